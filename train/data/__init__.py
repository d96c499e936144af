# SPDX-License-Identifier: Apache-2.0
"""Data: from files to batches of tokens."""
