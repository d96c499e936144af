# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for TPUs: optimizer steps on encoded moments."""
