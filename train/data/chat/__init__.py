# SPDX-License-Identifier: Apache-2.0
"""Turns files of conversations into rows of tokens to train on.

`documents` reads, renders and tokenizes whole files with the other modules, and
`packing` packs the result into rows for `train.data.batches`.
"""
