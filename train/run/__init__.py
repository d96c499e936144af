# SPDX-License-Identifier: Apache-2.0
"""Manages a run's folder, checkpoints, metrics, processes and comparisons."""
