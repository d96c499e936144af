# SPDX-License-Identifier: Apache-2.0
"""Manages a run: its folder, checkpoints, metrics, processes, comparisons."""
