# SPDX-License-Identifier: Apache-2.0
"""Pieces that the kernels of block and of grouped products share on Hopper.

Both run one persistent program per multiprocessor. One warpgroup loads blocks
into shared memory, and the others multiply.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

WARPGROUPS = 2  # Warpgroups that multiply; one more loads.
ROWS = 64  # Rows of one wgmma.
WAVE = WARPGROUPS * ROWS
# Three warpgroups of 128 threads share 65536 registers and start with 168 per
# thread.
REGISTERS, REGISTERS_TO_LOAD = 232, 40
LAYOUT = plgpu.Layout.WGMMA


def in_band(
  number: Array, tiles_m: int | Array, tiles_n: int, band: int
) -> tuple[Array, Array]:
  """Returns the tiles along m and n of the tile with this number.

  Programs work through `band` tiles along m before they move on along n, so
  that tiles computed at the same time read the same operands.
  """
  of_band = jnp.int32(band * tiles_n)
  first = lax.div(number, of_band) * band
  height = jnp.minimum(tiles_m - first, band)
  within = lax.rem(number, of_band)
  return first + lax.rem(within, height), lax.div(within, height)


def in_128_bytes(dtype: DTypeLike) -> int:
  """Returns how many values of this dtype 128 bytes hold."""
  return 128 // jnp.dtype(dtype).itemsize


def rows_of_128_bytes(*shape: int, dtype: DTypeLike):
  """Returns the type of shared memory in the layout that wgmma reads."""
  swizzled = (
    plgpu.TilingTransform((8, in_128_bytes(dtype))),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
  )
  return plgpu.SMEM(shape, dtype, transforms=swizzled)
