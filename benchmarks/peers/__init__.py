# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of other libraries, measured in the same way as this project."""
