# SPDX-License-Identifier: Apache-2.0
"""Commands that measure speed and memory; rerun them after the code changes.

Each command prints JSON rows, one per line. `studies/` contains experiments
that were run once.
"""
