# SPDX-License-Identifier: Apache-2.0
"""Experiments that were run once to answer a question.

Each study answers one question, such as how an 8-bit format changes a trained
model's moments. The documentation reports the answers. Run a study again if you
doubt its answer, or for a new codec, model or data set. `benchmarks/` contains
measurements to rerun after the code changes.
"""
