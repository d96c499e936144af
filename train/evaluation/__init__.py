# SPDX-License-Identifier: Apache-2.0
"""Parts of `train.evaluate`; each can be called by itself.

scoring     log-probabilities of tokens after others
documents   texts from files
perplexity  of texts
answers     of a model to the questions of conversations
page        answers as HTML
harness     lm-evaluation-harness over a `Decoder`, with the extra `eval`
tasks       its tasks, from its own package or a folder
report      tables and JSON
"""
