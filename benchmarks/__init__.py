# SPDX-License-Identifier: Apache-2.0
"""Commands that measure speed and memory, run again after the code changes.

Each prints its rows as JSON, one per line. `studies/` contains experiments on
accuracy and stability that were run once.
"""
