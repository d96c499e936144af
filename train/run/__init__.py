# SPDX-License-Identifier: Apache-2.0
"""Manages a run: folder, checkpoints, metrics, processes, comparison."""
