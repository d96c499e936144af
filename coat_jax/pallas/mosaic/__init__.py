# SPDX-License-Identifier: Apache-2.0
"""GPU kernels, written in Pallas and compiled by its Mosaic GPU backend."""

# Importing these modules registers their codecs with `moment_codecs.register`.
from coat_jax.pallas.mosaic import fp8 as fp8
from coat_jax.pallas.mosaic import log8 as log8
