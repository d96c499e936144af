# SPDX-License-Identifier: Apache-2.0
"""Commands that measure speed and memory, run again after the code changes.

Each prints one JSON row a line. Questions of accuracy and stability that were
answered once are in `studies/`.
"""
