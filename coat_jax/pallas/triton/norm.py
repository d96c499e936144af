# SPDX-License-Identifier: Apache-2.0
"""Norms of FP8 values in Triton: `ops.norm_input` and `norm_fwd`.

  norm_input  quantizes x to codes and scales of 1 x G groups; for the quantized
              values computes mean, rstd and amax(y),
              y = (x - mean) rstd gamma + beta
  norm_fwd    turns codes into y's operand, as rows, as columns or as both

A program of `norm_input` holds whole rows, padded to a power of two. Values
past the end of the row are masked and enter no mean, variance or amax.
`norm_fwd` is given the statistics and works in tiles. ("rms" has no mean.)

      norm_input           norm_fwd
      +----------------+   +----+----+
      | rows x D       |   |tile|    |  -> rows, columns
      +----------------+   +----+    |
      |                |   |         |

Bytes per element with x in BF16: norm_input 2 + 1 + 2 / G; norm_fwd 1 + 2 / G,
and 1 more per layout.

On an H200 (2026-11-21, jax 0.11.2, [8192, 4096], G = 16, "rms"): norm_input
takes 40 microseconds, 2.6 TB/s; norm_fwd takes 30 for rows and 32 for columns,
2.2 to 2.4 TB/s; XLA takes 113, 63 and 88.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  VALUES,
  Groups,
  Layout,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import NormKind, NormStats
from coat_jax.pallas.triton import tiles
from coat_jax.pallas.triton.scales import output_scale

# The backward pass keeps sums in registers; it would spill for longer rows.
_MAX_WIDTH = 8192


@dataclasses.dataclass(frozen=True)
class RowTile:
  """The rows that a program holds whole.

  Attributes:
    rows: number of rows, a power of two.
    warps: number of warps that share them.
  """

  rows: int
  warps: int


def pick_input_tile(width: int) -> RowTile:
  """Picks a tile of about 8192 values per program, 32 per thread."""
  padded = pl.next_power_of_2(width)
  rows = max(8192 // padded, 1)
  return RowTile(rows, max(rows * padded // 1024, 1))


def pick_tile(m: int, n: int, group_size: int) -> tiles.Tile:
  """Picks a tile of 32 to 64 values per thread, in whole groups."""
  if m * n < 2**21:
    return tiles.Tile(32, max(32, group_size), 1)
  return tiles.Tile(64, 128, 4)


def _why_not_input(x, groups, output, **_) -> str | None:
  return (
    tiles.why_not_format(groups.dtype, E4M3)
    or tiles.why_not_output(output, E4M3)
    or tiles.why_not_dtype(x.dtype)
    or why_not_rows(x.shape, groups.size)
  )


def why_not_rows(shape: tuple[int, ...], group_size: int | None) -> str | None:
  """Returns why a program cannot hold whole rows of this shape, or None."""
  if shape and shape[-1] > _MAX_WIDTH:
    return (
      f"the Triton kernel holds rows of at most {_MAX_WIDTH}, got {shape[-1]}"
    )
  return tiles.why_not_groups(shape, group_size)


@kernel(_why_not_input)
def norm_input(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  groups: Groups,
  output: Scaling = VALUES,
  interpret: bool = False,
) -> tuple[QTensor, NormStats, Array | None]:
  """`ops.norm_input`."""
  tile = pick_input_tile(x.shape[-1])
  x_q, stats, bits = _norm_input(
    x, gamma, beta, kind, eps, groups.size, tile, interpret
  )
  return (
    x_q,
    stats,
    output_scale(bits, output, interpret=interpret),
  )


@functools.partial(
  jax.jit,
  static_argnames=("kind", "eps", "group_size", "tile", "interpret"),
)
def _norm_input(x, gamma, beta, kind, eps, group_size, tile, interpret):
  *leading, n = x.shape
  m, width = x.size // n, pl.next_power_of_2(n)
  programs = pl.cdiv(m, tile.rows)
  rows = pl.BlockSpec((tile.rows, width), lambda i: (i, 0))
  groups = pl.BlockSpec((tile.rows, width // group_size), lambda i: (i, 0))
  per_row = pl.BlockSpec((tile.rows,), lambda i: (i,))
  vector = pl.BlockSpec((width,), lambda i: (0,))
  is_layer = kind == "layer"
  stat = jax.ShapeDtypeStruct((m,), jnp.float32)
  qvalue, scale, mean, rstd, bits = pl.pallas_call(
    functools.partial(
      _input_kernel, shape=(m, n), is_layer=is_layer, eps=eps, g=group_size
    ),
    grid=(programs,),
    in_specs=[
      rows,
      None if gamma is None else vector,
      None if beta is None else vector,
    ],
    out_specs=[
      rows,
      groups,
      per_row if is_layer else None,
      per_row,
      pl.BlockSpec((1,), lambda i: (i,)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((m, n), E4M3),
      jax.ShapeDtypeStruct((m, n // group_size), jnp.bfloat16),
      stat if is_layer else None,
      stat,
      jax.ShapeDtypeStruct((programs,), jnp.int32),
    ],
    compiler_params=tiles.compiler_params(tile.warps),
    interpret=interpret,
    name="norm_input",
  )(x.reshape(m, n), gamma, beta)
  x_q = QTensor(
    qvalue.reshape(x.shape),
    scale.reshape(*leading, n // group_size),
    group_size,
  )
  stats = NormStats(
    mean.reshape(leading) if is_layer else None, rstd.reshape(leading)
  )
  return x_q, stats, bits


def _input_kernel(*refs, shape, is_layer, eps, g):
  *refs, q_ref, scale_ref, mean_ref, rstd_ref, bits_ref = refs
  x_ref, gamma_ref, beta_ref = refs
  m, n = shape
  index = (pl.program_id(0), 0)
  mask = tiles.inside(x_ref.shape, shape, index)
  row_mask = tiles.inside(rstd_ref.shape, (m,), index[:1])
  x = tiles.load(x_ref, mask)
  codes, scale = tiles.quantize_groups(x, group_size=g, dtype=q_ref.dtype)
  tiles.store(q_ref, codes, mask)
  group_mask = tiles.inside(scale_ref.shape, (m, n // g), index)
  tiles.store(scale_ref, scale, group_mask)
  x = tiles.dequantize_groups(codes, scale, group_size=g)
  mean, centred = None, x
  if is_layer:
    mean = jnp.sum(x, axis=-1) / n
    tiles.store(mean_ref, mean, row_mask)
    centred = _within(x - mean[:, None], mask)
  rstd = jax.lax.rsqrt(jnp.sum(centred * centred, axis=-1) / n + eps)
  tiles.store(rstd_ref, rstd, row_mask)
  gamma, beta = vector(gamma_ref, n), vector(beta_ref, n)
  y = _normalized(x, mean, rstd, gamma, beta)
  tiles.store_scalar(bits_ref, tiles.amax_bits(_within(y, mask)))


def _within(x, mask) -> Array:
  """Zeroes values after the end of rows, which the statistics have changed."""
  return x if mask is None else jnp.where(mask, x, 0.0)


def vector(ref, n, index=0) -> Array | None:
  """Loads a tile of gamma or beta [n] as a row of a matrix."""
  if ref is None:
    return None
  return tiles.load(ref, tiles.inside(ref.shape, (n,), (index,)))[None, :]


def _normalized(x, mean, rstd, gamma, beta) -> Array:
  """Returns (x - mean) rstd gamma + beta."""
  if mean is not None:
    x = x - mean[:, None]
  y = x * rstd[:, None]
  if gamma is not None:
    y = y * gamma
  if beta is not None:
    y = y + beta
  return y


# --- Forward -----------------------------------------------------------------


def _why_not_fwd(x, output, scale, layout, **_) -> str | None:
  shape = x.qvalue.shape
  return (
    tiles.why_not_format(x.qvalue.dtype, E4M3, E5M2)
    or tiles.why_not_scaling(output, E4M3)
    or tiles.why_not_groups(shape, x.group_size)
    or tiles.why_not_columns(shape, layout)
    or tiles.why_not_scale(scale)
  )


@kernel(_why_not_fwd)
def norm_fwd(
  x: QTensor,
  gamma: Array | None,
  beta: Array | None,
  stats: NormStats,
  *,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
  interpret: bool = False,
) -> Operand:
  """`ops.norm_fwd`."""
  assert isinstance(scale, Array) and x.group_size is not None
  group_size = x.group_size
  n = x.qvalue.shape[-1]
  tile = pick_tile(x.qvalue.size // n, n, group_size)
  rows, columns = _norm_fwd(
    x, gamma, beta, stats, scale, group_size, layout, tile, interpret
  )
  return Operand(rows, columns, scale)


@functools.partial(
  jax.jit, static_argnames=("group_size", "layout", "tile", "interpret")
)
def _norm_fwd(
  x, gamma, beta, stats, scale, group_size, layout, tile, interpret
):
  n = x.qvalue.shape[-1]
  m = x.qvalue.size // n
  vector = tile.spec((tile.columns,), (1,))
  per_row = tile.spec((tile.rows,), (0,))
  mean = None if stats.mean is None else stats.mean.reshape(m)
  out_specs, out_shape = tile.operand(m, n, E4M3, layout)
  rows, columns = pl.pallas_call(
    functools.partial(_fwd_kernel, shape=(m, n), g=group_size, tile=tile),
    grid=tile.grid(m, n),
    in_specs=[
      tile.matrix(),
      tile.matrix(group_size),
      None if gamma is None else vector,
      None if beta is None else vector,
      None if mean is None else per_row,
      per_row,
      tiles.scalar_spec(),
    ],
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=tiles.compiler_params(tile.warps),
    interpret=interpret,
    name="norm_fwd",
  )(
    x.qvalue.reshape(m, n),
    x.scale.reshape(m, n // group_size),
    gamma,
    beta,
    mean,
    stats.rstd.reshape(m),
    scale.reshape(1),
  )
  return (None if rows is None else rows.reshape(x.qvalue.shape)), columns


def _fwd_kernel(*refs, shape, g, tile):
  *refs, rows_ref, columns_ref = refs
  q_ref, scales_ref, gamma_ref, beta_ref, mean_ref, rstd_ref, scale_ref = refs
  m, n = shape
  i, j = index = tile.index()
  x = values(q_ref, scales_ref, shape, index, g)
  row_mask = tiles.inside(rstd_ref.shape, (m,), (i,))
  mean = None if mean_ref is None else tiles.load(mean_ref, row_mask)
  rstd = tiles.load(rstd_ref, row_mask)
  gamma, beta = vector(gamma_ref, n, j), vector(beta_ref, n, j)
  y = _normalized(x, mean, rstd, gamma, beta)
  codes = tiles.saturating_cast(y / scale_ref[0], E4M3)
  tiles.store_operand(rows_ref, columns_ref, codes, index, shape)


def values(q_ref, scale_ref, shape, index, g) -> Array:
  """Dequantizes a tile of codes with its scales; zeros outside [m, n]."""
  m, n = shape
  codes = tiles.load(q_ref, tiles.inside(q_ref.shape, shape, index))
  mask = tiles.inside(scale_ref.shape, (m, n // g), index)
  scale = tiles.load(scale_ref, mask)
  return tiles.dequantize_groups(codes, scale, group_size=g)
