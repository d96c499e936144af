# SPDX-License-Identifier: Apache-2.0
"""Experiments that were run once to answer a question.

Each study answers one question about accuracy or stability, such as how an
8-bit format changes a trained model's moments. The documentation reports the
answers. Run a study again if you doubt its answer, or for a new codec, model or
data set. `benchmarks/` measures speed and memory, which change with the code.
Studies import `benchmarks` and `train`, which import no study.
"""
