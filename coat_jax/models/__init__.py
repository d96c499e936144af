# SPDX-License-Identifier: Apache-2.0
"""Models built of the layers."""
