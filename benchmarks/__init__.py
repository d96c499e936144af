# SPDX-License-Identifier: Apache-2.0
"""Commands that measure speed and memory, run again after the code changes.

Each prints its rows as JSON, one per line. `studies/` answers questions of
accuracy and stability, which were run once.
"""
