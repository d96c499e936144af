# SPDX-License-Identifier: Apache-2.0
"""Adapters for other libraries, one file per library."""
