# SPDX-License-Identifier: Apache-2.0
"""Operands in blocks of 128, in plain jnp: recipes with scaling="block".

A product sums over blocks of 128, and each operand has a scale for each block:

  activations, gradients   1 x 128 along what the product sums over
  weights                  128 x 128

So x is quantized along its features where it is multiplied by a weight, and
along tokens where it is multiplied by a gradient: rows and columns of such an
operand differ in codes. Scales are powers of two: requantized along the other
axis, values stay what they are (all but those 2^14 below a block's largest),
and each operand's values are exact in BF16.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2; docs/deviations.md 24.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3, saturating_cast
from coat_jax.ops.dispatch import op
from coat_jax.ops.quantize import quantize_tensor
from coat_jax.ops.types import BlockScales, Layout, Operand
from coat_jax.qtensor import (
  QTensor,
  group_amax,
  power_of_two_scale,
  quantize_with_scale,
)

BLOCK = 128


@op()
def quantize_blocks(
  x: Array, *, dtype: DTypeLike = E4M3, layout: Layout = "rows"
) -> Operand:
  """[..., n] to an operand with a scale per 128 values that are summed over.

  Rows are quantized along n, columns [n, m] along the m rows.
  """
  rows = columns = QTensor(None, None)  # pyright: ignore[reportArgumentType]
  if layout != "columns":
    rows = _in_blocks(x, dtype)
  if layout != "rows":
    columns = _in_blocks(x.reshape(-1, x.shape[-1]).T, dtype)
  scale = BlockScales(rows.scale, columns.scale)
  return Operand(rows.qvalue, columns.qvalue, scale)


def _in_blocks(x: Array, dtype: DTypeLike) -> QTensor:
  scale = power_of_two_scale(group_amax(x, BLOCK), dtype)
  return quantize_with_scale(x, scale, group_size=BLOCK, dtype=dtype)


@op()
def tile_scales(w: Array, *, dtype: DTypeLike = E4M3) -> Array:
  """Scales of [m, n] per tile: f32 [ceil(m / 128), ceil(n / 128)]."""
  amax = group_amax(group_amax(w, BLOCK).T, BLOCK).T
  return power_of_two_scale(amax, dtype)


@op()
def quantize_tiles(
  w: Array,
  *,
  dtype: DTypeLike = E4M3,
  scale: Array | None = None,
  layout: Layout = "rows",
) -> Operand:
  """[m, n] to an operand with a scale per 128 x 128; `scale` given: with it.

  Columns are the transpose of rows, and so are their scales.
  """
  if scale is None:
    scale = tile_scales.definition(w, dtype=dtype)
  spread = _spread(scale, w.shape)
  codes = saturating_cast(w.astype(jnp.float32) / spread, dtype)
  has_rows, has_columns = layout != "columns", layout != "rows"
  return Operand(
    codes if has_rows else None,
    codes.T if has_columns else None,
    BlockScales(scale if has_rows else None, scale.T if has_columns else None),
  )


@op()
def turn_blocks(x: Operand) -> Operand:
  """Rows of `quantize_blocks` to columns of the values that they stand for."""
  assert x.rows is not None and isinstance(x.scale, BlockScales)
  assert x.scale.rows is not None
  n = x.rows.shape[-1]
  values = block_values(
    x.rows.reshape(-1, n), x.scale.rows.reshape(-1, x.scale.rows.shape[-1])
  )
  return quantize_blocks.definition(
    values, dtype=x.rows.dtype, layout="columns"
  )


def block_values(
  codes: Array, scale: Array, dtype: DTypeLike = jnp.float32
) -> Array:
  """What codes [m, n] stand for, in `dtype`: exact in BF16.

  `scale` is [m, ceil(n / 128)], or of tiles [ceil(m / 128), ceil(n / 128)].
  """
  values = codes.astype(jnp.float32) * _spread(scale, codes.shape)
  return values.astype(dtype)


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
  """Scales of blocks or of tiles of [m, n] to one for each value."""
  m, n = shape
  if scale.shape[0] != m:
    scale = jnp.repeat(scale, BLOCK, axis=0)[:m]
  return jnp.repeat(scale, BLOCK, axis=1)[:, :n]


def values_to_operand(
  x: Array, *, scale: Array | None, layout: Layout, dtype: DTypeLike
) -> Operand:
  """[..., n] with this scale of the tensor; in blocks for None."""
  if scale is None:
    return quantize_blocks.definition(x, dtype=dtype, layout=layout)
  return quantize_tensor.definition(x, scale=scale, layout=layout, dtype=dtype)
