# SPDX-License-Identifier: Apache-2.0
"""Adam with encoded moments: arithmetic, state, shards, conversion, reports."""
