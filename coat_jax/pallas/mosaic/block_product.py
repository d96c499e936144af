# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 matmuls on Hopper's tensor cores, in Mosaic GPU.

  out [m, n] = sum of a_j b_j^T a_scale_j b_scale_j over blocks j of 128 along k

m, n and k are multiples of 128. In each block, a has one scale per row, and b
has one scale per row or per 128 rows. The kernel (`block_kernel`) reads
transposed scales, so that one copy fetches the scales of all rows of a tile.

The kernel multiplies by the product of the two scales. If this product is below
1.2e-38, it is inexact or 0, and the result differs from that of `ops.linear`.
There is one exception: if tiles have 256 rows and b has one scale per row, the
kernel multiplies by one scale after the other.

On an H200 (jax 0.11.2) the kernel reaches 860 to 1180 TFLOP/s at the shapes of
Llama-2-7B.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import BLOCK, BlockScales, Operand
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.linear import in_columns, in_rows, in_sum
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import block_kernel, device, wgmma
from coat_jax.pallas.mosaic.block_kernel import Tile, Work

# `pick_tile` picks the first tile that fits. "low" fits all shapes that the
# kernel supports.
TILES = {
  "paired": Tile(cluster=2),
  "tall": Tile(),
  "low": Tile(waves=1, stages=5, slots=2, band=16),
}


def pick_tile(m: int, n: int) -> Tile:
  """Picks a tile for a result [m, n]; m and n are multiples of 128."""
  return next(tile for tile in TILES.values() if tile.fits(m, n))


def _why_not(a: Operand, b: Operand, arrays, dtype: DTypeLike) -> str | None:
  """Returns why the kernel cannot multiply the codes `arrays`, or None."""
  if not all(isinstance(x.scale, BlockScales) for x in (a, b)):
    return (
      f"the Mosaic kernel needs one scale per block of {BLOCK}, got one scale "
      "per tensor"
    )
  reason = device.why_not_hopper()
  if reason is not None:
    return reason
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return f"the kernel writes bfloat16, float16 or float32, got {dtype}"
  reason = supported.why_not_fp8(*(x.dtype for x in arrays))
  if reason is not None:
    return reason
  (*rows, k), n = arrays[0].shape, arrays[1].shape[0]
  m = math.prod(rows)
  if any(size % BLOCK or size == 0 for size in (m, n, k)):
    return (
      f"the Mosaic kernel needs sizes that are multiples of {BLOCK}, got [{m}, "
      f"{k}] times [{k}, {n}]"
    )
  return None


@kernel(lambda x, w, dtype, **_: _why_not(x, w, (x.rows, w.columns), dtype))
def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
  bias: Array | None = None,
  interpret: bool = False,
) -> Array:
  """Computes `ops.linear_fwd`; XLA adds the bias in a separate pass."""
  rows, columns = in_rows(x), in_columns(w)
  if bias is None:
    y = product(rows, columns, dtype, add, interpret=interpret)
  else:
    y = product(rows, columns, jnp.float32, add, interpret=interpret)
    y = in_sum(y, dtype, None, bias)
  assert x.rows is not None
  return y.reshape(*x.rows.shape[:-1], y.shape[-1])


@kernel(lambda g, w, dtype, **_: _why_not(g, w, (g.rows, w.rows), dtype))
def linear_dgrad(
  g: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """Computes `ops.linear_dgrad`."""
  dx = product(in_rows(g), in_rows(w), dtype, interpret=interpret)
  assert g.rows is not None
  return dx.reshape(*g.rows.shape[:-1], dx.shape[-1])


@kernel(lambda x, g, dtype, **_: _why_not(x, g, (x.columns, g.columns), dtype))
def linear_wgrad(
  x: Operand,
  g: Operand,
  *,
  dtype: DTypeLike = jnp.float32,
  interpret: bool = False,
) -> Array:
  """Computes `ops.linear_wgrad`."""
  return product(in_columns(x), in_columns(g), dtype, interpret=interpret)


def product(
  a: QTensor,
  b: QTensor,
  dtype: DTypeLike,
  add: Array | None = None,
  *,
  tile: Tile | None = None,
  programs: int | None = None,
  interpret: bool = False,
) -> Array:
  """Computes a b^T [m, n], plus `add` if given, from a [m, k] and b [n, k].

  Scales are f32. Those of a are [m, k / 128]. Those of b are [n, k / 128], or
  [n / 128, k / 128] if b has one scale per 128 x 128 block. `add` is added in
  f32. By default, one program runs per multiprocessor. With `interpret`, the
  kernel runs on a CPU and reports races.
  """
  (m, k), n = a.qvalue.shape, len(b.qvalue)
  tile = tile or pick_tile(m, n)
  assert tile.fits(m, n), (m, n, tile)
  b_scale = b.scale.T
  if is_b_tiled := len(b.scale) != n:
    b_scale = jnp.repeat(b_scale, block_kernel.COPIES, axis=1)
  clusters = (programs or device.multiprocessors()) // tile.cluster
  work = Work(
    tile=tile,
    tiles_m=m // tile.m,
    tiles_n=n // tile.n,
    blocks=k // BLOCK,
    clusters=min(clusters, (m // tile.m) * (n // tile.n)),
    is_b_tiled=is_b_tiled,
    interpret=interpret,
  )
  dtypes = a.qvalue.dtype, b.qvalue.dtype, dtype
  kernel = wgmma.kernel(
    functools.partial(block_kernel.run, work),
    out_type=jax.ShapeDtypeStruct((m, n), dtype),
    scratch_types=block_kernel.scratch(work, *dtypes)._asdict(),
    grid=(work.clusters,),
    grid_names=("program",),
    cluster=(tile.cluster,),
    cluster_names=("cluster",),
    interpret=interpret,
    kernel_name="block_product",
  )
  added = [] if add is None else [add.reshape(m, n)]
  return kernel(a.qvalue, a.scale.T, b.qvalue, b_scale, *added)
