# SPDX-License-Identifier: Apache-2.0
"""Experiments that were run once to answer a question.

Each answers one question about accuracy or stability, such as what an 8-bit
format does to a trained model's moments; the documentation reports the answer.
`benchmarks/` measures speed and memory, which change with the code, so its
commands are run again after a change. A study is run again only if somebody
doubts its answer or asks it about something new. Studies import from
`benchmarks` and `train`, and neither imports a study.
"""
