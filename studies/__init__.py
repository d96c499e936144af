# SPDX-License-Identifier: Apache-2.0
"""Experiments that were run once to answer a question.

Each answers one question about accuracy or stability, such as how an 8-bit
format changes a trained model's moments. The documentation reports the answers.
Run a study again if you doubt its answer, or to ask it about something new.
`benchmarks/` measures speed and memory, which change with the code. Studies
import from `benchmarks` and `train`, and neither imports a study.
"""
