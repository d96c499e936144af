# SPDX-License-Identifier: Apache-2.0
"""Constants and helpers of kernels that multiply with wgmma.

In these kernels (matmuls and attention), one warpgroup loads blocks or tiles
into shared memory, and the others, usually two, multiply them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

WARPGROUPS = 2  # Usual number of warpgroups that multiply.
ROWS = 64  # Number of rows of the result that one wgmma computes.
WAVE = WARPGROUPS * ROWS  # Number of rows that two warpgroups compute at once.
# For matmuls, maps the number of warpgroups that multiply to the registers per
# thread of these warpgroups, and of the warpgroup that loads.
REGISTERS = {2: (232, 40), 3: (160, 24)}
LAYOUT = plgpu.Layout.WGMMA


def kernel(
  body: Callable[..., None],
  *,
  warpgroups: int = WARPGROUPS,
  approx_math: bool = False,
  interpret: bool,
  **options,
) -> Callable[..., Any]:
  """Makes a kernel with one warpgroup that loads and others that multiply.

  `body` needs its own barriers. With `interpret`, the kernel runs on a CPU and
  reports races.
  """
  return plgpu.kernel(
    body,
    num_threads=warpgroups + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=approx_math, unsafe_no_auto_barriers=True
    ),
    interpret=plgpu.InterpretGPUParams(detect_races=True)
    if interpret
    else False,
    **options,
  )


def in_band(
  number: Array, tiles_m: int | Array, tiles_n: int, band: int
) -> tuple[Array, Array]:
  """Returns the indices along m and n of the tile with this number.

  Tiles are numbered band by band. A band is `band` tiles high (along m). Within
  it, tiles are numbered along m first, so that tiles that are computed at the
  same time share parts of both operands.
  """
  per_band = jnp.int32(band * tiles_n)
  first = lax.div(number, per_band) * band
  height = jnp.minimum(tiles_m - first, band)
  within = lax.rem(number, per_band)
  return first + lax.rem(within, height), lax.div(within, height)


def in_128_bytes(dtype: DTypeLike) -> int:
  """Returns how many values of this dtype fit in 128 bytes."""
  return 128 // jnp.dtype(dtype).itemsize


def swizzled_rows(*shape: int, dtype: DTypeLike):
  """Returns the type of shared memory in a swizzled layout of wgmma.

  Rows, along the last axis, must be multiples of 32 bytes. They are divided
  into pieces of 128, 64 or 32 bytes, preferably long ones.
  """
  size = jnp.dtype(dtype).itemsize
  piece = math.gcd(shape[-1] * size, 128)
  swizzled = (
    plgpu.TilingTransform((8, piece // size)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(piece),  # pyright: ignore[reportAbstractUsage]
  )
  return plgpu.SMEM(shape, dtype, transforms=swizzled)
