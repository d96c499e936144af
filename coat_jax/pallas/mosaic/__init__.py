# SPDX-License-Identifier: Apache-2.0
"""Kernels that Pallas compiles through Mosaic GPU."""

# Importing the codecs' modules registers their register codecs.
from coat_jax.pallas.mosaic import fp8 as fp8
from coat_jax.pallas.mosaic import log8 as log8
