# SPDX-License-Identifier: Apache-2.0
"""Parts of `train.evaluate`; each part can be used alone.

scoring     computes log-probabilities of tokens
documents   reads texts from files
perplexity  measures how well a model predicts texts
answers     lets a model answer the questions of conversations
page        writes answers as HTML
harness     runs lm-evaluation-harness on a decoder; needs the extra `eval`
tasks       finds and runs the harness's tasks, from its package or a folder
report      formats results as tables and writes them as JSON
"""
