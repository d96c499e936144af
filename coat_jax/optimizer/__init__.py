# SPDX-License-Identifier: Apache-2.0
"""FP8 optimizers (AdamW, Lion, Muon): arithmetic, state, shards, reports."""
