# SPDX-License-Identifier: Apache-2.0
"""Kernels that Pallas compiles through Mosaic GPU."""

# The codecs' modules register what they define.
from coat_jax.pallas.mosaic import fp8 as fp8
from coat_jax.pallas.mosaic import log8 as log8
