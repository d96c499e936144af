# SPDX-License-Identifier: Apache-2.0
"""Measures other libraries in the same way as `benchmarks` measures ours."""
