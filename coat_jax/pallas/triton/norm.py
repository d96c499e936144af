# SPDX-License-Identifier: Apache-2.0
"""Norms of FP8 values in Triton: `ops.norm_input` and `norm_fwd`.

  norm_input  quantizes x to codes and scales of 1 x G groups; from the
              quantized values it computes mean, rstd and amax(y),
              y = (x - mean) rstd gamma + beta  (without a mean for "rms")
  norm_fwd    computes y from the codes and writes it in E4M3, by rows, by
              columns or both

A program of `norm_input` holds whole rows, padded to a power of two. Values
past the end of the row are masked, so they affect no mean, variance or amax.
`norm_fwd` gets the statistics and works in tiles. Both run at 2.2 to 2.6 TB/s
on an H200 (jax 0.11.2, [8192, 4096], G = 16, "rms").
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3
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
from coat_jax.pallas import supported
from coat_jax.pallas.triton import matrix, tiles
from coat_jax.pallas.triton.matrix import Blocked, Matrix, Tile
from coat_jax.pallas.triton.scales import output_scale

# The backward pass keeps sums in registers, which would spill for longer rows.
_MAX_WIDTH = 8192


class RowTile(NamedTuple):
  """The number of whole rows (a power of two) and of warps of a program."""

  rows: int
  warps: int


def pick_input_tile(width: int) -> RowTile:
  """Picks a tile of about 8192 values per program, 32 per thread."""
  padded = pl.next_power_of_2(width)
  rows = max(8192 // padded, 1)
  return RowTile(rows, max(rows * padded // 1024, 1))


def pick_tile(m: int, n: int, group_size: int) -> Tile:
  """Picks a tile of 32 to 64 values per thread, in whole groups."""
  if m * n < 2**21:
    return Tile(32, max(32, group_size), 1)
  return Tile(64, 128, 4)


# --- Whole rows --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
  """A matrix [m, n] of which each program gets `height` whole rows.

  Rows are padded to a power of two. A method cuts an array into the programs'
  tiles. A dtype stands for a result; for None it returns None.
  """

  m: int
  n: int
  height: int
  group_size: int

  @property
  def width(self) -> int:
    return pl.next_power_of_2(self.n)

  @property
  def programs(self) -> int:
    return pl.cdiv(self.m, self.height)

  def values(self, x: Array | DTypeLike | None) -> Blocked | None:
    """Cuts [m, n] into whole rows."""
    spec = pl.BlockSpec((self.height, self.width), lambda i: (i, 0))
    return matrix.blocked(spec, (self.m, self.n), x)

  def scales(self, x: Array | DTypeLike) -> Blocked | None:
    """Cuts the groups' scales [m, n / group_size] into whole rows."""
    tile = self.height, self.width // self.group_size
    spec = pl.BlockSpec(tile, lambda i: (i, 0))
    return matrix.blocked(spec, (self.m, self.n // self.group_size), x)

  def per_row(self, x: Array | DTypeLike | None) -> Blocked | None:
    """Cuts a vector with one value per row, [m]."""
    return matrix.vector(self.height, self.m, x)

  def per_column(self, x: Array | None) -> Blocked | None:
    """Gives every program all of gamma or beta [n]."""
    spec = pl.BlockSpec((self.width,), lambda i: (0,))
    return matrix.blocked(spec, (self.n,), x)


def why_not_rows(shape: tuple[int, ...]) -> str | None:
  """Returns why a program cannot hold whole rows of this shape, or None."""
  if shape and shape[-1] > _MAX_WIDTH:
    return (
      f"the Triton kernel holds rows of at most {_MAX_WIDTH}, got {shape[-1]}"
    )
  return None


# --- Input -------------------------------------------------------------------


def _why_not_input(x, groups, output, **_) -> str | None:
  return why_not_rows(x.shape) or supported.why_not_read(
    x, x.shape, groups, output
  )


@kernel(_why_not_input)
@jax.jit(static_argnames=("kind", "eps", "groups", "output", "interpret"))
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
  *leading, n = x.shape
  height, warps = pick_input_tile(n)
  rows = Rows(x.size // n, n, height, groups.size)
  qvalue, scale, mean, rstd, bits = matrix.run(
    functools.partial(_input_kernel, rows=rows, eps=eps),
    [rows.values(x), rows.per_column(gamma), rows.per_column(beta)],
    [
      rows.values(E4M3),
      rows.scales(jnp.bfloat16),
      rows.per_row(jnp.float32) if kind == "layer" else None,
      rows.per_row(jnp.float32),
      matrix.vector(1, rows.programs, jnp.int32),
    ],
    grid=(rows.programs,),
    warps=warps,
    interpret=interpret,
    name="norm_input",
  )
  x_q = QTensor(
    qvalue.reshape(x.shape),
    scale.reshape(*leading, n // groups.size),
    groups.size,
  )
  mean = None if mean is None else mean.reshape(leading)
  stats = NormStats(mean, rstd.reshape(leading))
  return x_q, stats, output_scale(bits, output, interpret)


def _input_kernel(*refs, rows: Rows, eps):
  *refs, q_ref, scale_ref, mean_ref, rstd_ref, bits_ref = refs
  x_ref, gamma_ref, beta_ref = refs
  m, n, g = rows.m, rows.n, rows.group_size
  index = (pl.program_id(0), 0)
  mask = tiles.inside(x_ref.shape, (m, n), index)
  row_mask = tiles.inside(rstd_ref.shape, (m,), index[:1])
  x = tiles.load(x_ref, mask)
  codes, scale = tiles.quantize_groups(x, group_size=g, dtype=q_ref.dtype)
  tiles.store(q_ref, codes, mask)
  group_mask = tiles.inside(scale_ref.shape, (m, n // g), index)
  tiles.store(scale_ref, scale, group_mask)
  x = tiles.dequantize_groups(codes, scale, group_size=g)
  mean, centred = None, x
  if mean_ref is not None:
    mean = jnp.sum(x, axis=-1) / n
    tiles.store(mean_ref, mean, row_mask)
    centred = _within(x - mean[:, None], mask)
  rstd = jax.lax.rsqrt(jnp.sum(centred * centred, axis=-1) / n + eps)
  tiles.store(rstd_ref, rstd, row_mask)
  gamma, beta = load_vector(gamma_ref, n), load_vector(beta_ref, n)
  y = _normalized(x, mean, rstd, gamma, beta)
  tiles.store_scalar(bits_ref, tiles.amax_bits(_within(y, mask)))


def _within(x, mask) -> Array:
  """Zeroes the padding of rows, which may have become nonzero."""
  return x if mask is None else jnp.where(mask, x, 0.0)


def load_vector(ref, n, index=0) -> Array | None:
  """Loads a tile of gamma or beta [n] as a matrix of one row."""
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
  return supported.why_not_values(x) or supported.why_not_written(
    x.qvalue.shape, output, scale, layout
  )


@kernel(_why_not_fwd)
@jax.jit(static_argnames=("output", "layout", "interpret"))
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
  n = x.qvalue.shape[-1]
  m = x.qvalue.size // n
  tile = pick_tile(m, n, x.group_size)
  whole = Matrix(m, n, tile, interpret, x.group_size)
  rows, columns = whole.run(
    _fwd_kernel,
    [
      *whole.quantized(x),
      whole.per_column(gamma),
      whole.per_column(beta),
      whole.per_row(stats.mean),
      whole.per_row(stats.rstd),
      matrix.scalar(scale),
    ],
    whole.operand(E4M3, layout),
    name="norm_fwd",
  )
  return Operand(matrix.like(rows, x.qvalue), columns, scale)


def _fwd_kernel(whole, *refs):
  *refs, rows_ref, columns_ref = refs
  q_ref, scales_ref, gamma_ref, beta_ref, mean_ref, rstd_ref, scale_ref = refs
  i, j = whole.index()
  codes = whole.load(q_ref)
  scale = tiles.load(scales_ref, whole.group_mask())
  x = tiles.dequantize_groups(codes, scale, group_size=whole.group_size)
  row_mask = tiles.inside(rstd_ref.shape, (whole.m,), (i,))
  mean = None if mean_ref is None else tiles.load(mean_ref, row_mask)
  rstd = tiles.load(rstd_ref, row_mask)
  gamma = load_vector(gamma_ref, whole.n, j)
  beta = load_vector(beta_ref, whole.n, j)
  y = _normalized(x, mean, rstd, gamma, beta)
  codes = tiles.saturating_cast(y / scale_ref[0], E4M3)
  whole.store_operand(rows_ref, columns_ref, codes)
