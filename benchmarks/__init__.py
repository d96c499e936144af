# SPDX-License-Identifier: Apache-2.0
"""Commands that print the figures of the documentation, one JSON row each."""
