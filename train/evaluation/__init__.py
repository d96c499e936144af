# SPDX-License-Identifier: Apache-2.0
"""Parts of `train.evaluate`; each can be used by itself.

scoring     computes log-probabilities of tokens
documents   reads texts from files
perplexity  measures how well a model predicts texts
answers     lets a model answer the questions of conversations
page        writes answers as HTML
harness     runs lm-evaluation-harness on a decoder (extra `eval`)
tasks       finds the harness's tasks, in its package or in a folder
report      writes tables and JSON
"""
