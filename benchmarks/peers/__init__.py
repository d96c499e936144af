# SPDX-License-Identifier: Apache-2.0
"""Benchmarks other libraries in the same way as this project."""
