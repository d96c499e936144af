# SPDX-License-Identifier: Apache-2.0
"""A run: its folder, checkpoints, metrics, processes and comparison."""
