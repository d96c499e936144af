# SPDX-License-Identifier: Apache-2.0
"""Forward pass of norms in FP8, in Mosaic GPU: `ops.norm_input`, `norm_fwd`.

  norm_input  quantizes x in groups, and computes mean, rstd and amax(y) from
              the quantized values, where y = (x - mean) rstd gamma + beta (no
              mean is subtracted for "rms")
  norm_fwd    computes y from the codes, mean and rstd, and writes it in E4M3,
              in the row layout, the column layout (transposed) or both

A program of `norm_input` processes one row, or four rows of up to 1,280 values
(see `whole_rows`). A program of `norm_fwd` processes a tile (see `tiles`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from coat_jax.pallas.mosaic import (
  device,
  row_ptx,
  rows,
  scales,
  tiles,
  whole_rows,
)
from coat_jax.pallas.mosaic.magnitudes import magnitude_bits

# --- Input -------------------------------------------------------------------


def _why_not_input(x, groups, output, **_) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_read(x, x.shape, groups, output)
    or whole_rows.why_not_row(x.shape, groups.size)
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
  """Computes `ops.norm_input`."""
  *leading, n = x.shape
  m, g = x.size // n, groups.size
  per_row = jax.ShapeDtypeStruct((m,), jnp.float32)
  per_warp = whole_rows.pick_per_warp(m, n, g)
  if per_warp is None:
    shape, programs = (m * n // g, g), m
    kernel = functools.partial(_input_kernel, eps=eps, interpret=interpret)
  else:
    shape, programs = (m, n // g, g), pl.cdiv(m, row_ptx.WARPS)
    kernel = functools.partial(
      _input_kernel_per_warp, load=per_warp, eps=eps, interpret=interpret
    )
  qvalue, scale, mean, rstd, bits = rows.run(
    kernel,
    [x.reshape(shape), *(whole_rows.in_groups(v, g) for v in (gamma, beta))],
    [
      jax.ShapeDtypeStruct(shape, E4M3),
      jax.ShapeDtypeStruct(shape[:-1], jnp.bfloat16),
      per_row if kind == "layer" else None,
      per_row,
      scales.maxima(m),
    ],
    grid=(programs,),
    interpret=interpret,
    kernel_name="norm_input",
  )
  x_q = QTensor(qvalue.reshape(x.shape), scale.reshape(*leading, n // g), g)
  mean = None if mean is None else mean.reshape(leading)
  stats = NormStats(mean, rstd.reshape(leading))
  return x_q, stats, scales.output_scale(bits, output, interpret)


def _input_kernel_per_warp(*refs, load, eps, interpret):
  """Processes four rows, one per warp."""
  *refs, q_gmem, scale_gmem, mean_gmem, rstd_gmem, bits_gmem = refs
  x_gmem, gamma_gmem, beta_gmem = refs
  m, groups, g = x_gmem.shape
  n, place = groups * g, rows.part("last", row_ptx.WARPS, m)
  x = rows.load_groups(x_gmem.at[place], load)
  codes, scale = rows.quantize_groups(x, q_gmem.dtype, load, interpret)
  rows.store(q_gmem.at[place], codes)
  rows.store(scale_gmem.at[place], scale.astype(scale_gmem.dtype))
  x = rows.dequantize_groups(codes, scale)

  def mean_of(x):
    return load.combined(jnp.add, jnp.sum, x) / n

  def of_vector(ref):
    layout = load.layout.reduce(0)
    vector = plgpu.load(ref, layout=layout, optimized=False)
    return lax.broadcast_in_dim(vector.astype(jnp.float32), x.shape, (1, 2))

  if mean_gmem is not None:
    mean = mean_of(x)
    rows.store(mean_gmem.at[place], mean)
    x = x - rows.spread(mean, x.shape)
  rstd = lax.rsqrt(mean_of(x * x) + eps)
  rows.store(rstd_gmem.at[place], rstd)
  y = x * rows.spread(rstd, x.shape)
  if gamma_gmem is not None:
    y = y * of_vector(gamma_gmem)
  if beta_gmem is not None:
    y = y + of_vector(beta_gmem)
  bits = load.combined(jnp.maximum, jnp.max, magnitude_bits(y))
  rows.store(bits_gmem.at[place, 0], bits)


def _input_kernel(*refs, eps, interpret):
  *refs, q_gmem, scale_gmem, mean_gmem, rstd_gmem, bits_gmem = refs
  x_gmem, gamma_gmem, beta_gmem = refs
  row = lax.axis_index("last")
  n = x_gmem.size // rstd_gmem.shape[0]
  parts = whole_rows.row_parts(n, x_gmem.shape[1])

  def load(ref, part, place):
    return rows.load_groups(ref.at[place], part.load)

  loaded = [load(x_gmem, part, part.of_row(row)) for part in parts]
  values = []
  for part, x in zip(parts, loaded, strict=True):
    codes, scale = rows.quantize_groups(x, q_gmem.dtype, part.load, interpret)
    place = part.of_row(row)
    rows.store(q_gmem.at[place], codes)
    rows.store(scale_gmem.at[place], scale.astype(scale_gmem.dtype))
    values.append(rows.dequantize_groups(codes, scale))
  centred = values
  mean = None
  if mean_gmem is not None:
    mean = whole_rows.sum_of_row(parts, values) / n
    mean_gmem[row] = mean
    centred = [x - mean for x in values]
  squares = [x * x for x in centred]
  rstd = lax.rsqrt(whole_rows.sum_of_row(parts, squares) / n + eps)
  rstd_gmem[row] = rstd
  bits = jnp.int32(0)
  for part, x in zip(parts, centred, strict=True):
    y = x * rstd
    if gamma_gmem is not None:
      y = y * load(gamma_gmem, part, part.of_vector)
    if beta_gmem is not None:
      y = y + load(beta_gmem, part, part.of_vector)
    bits = jnp.maximum(bits, rows.amax_bits(y, part.load.count))
  scales.store_maximum(bits_gmem, row, bits)


# --- Forward -----------------------------------------------------------------


def _why_not_fwd(x, output, scale, layout, **_) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_values(x)
    or supported.why_not_written(x.qvalue.shape, output, scale, layout)
    or tiles.why_not(x.qvalue.shape)
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
  """Computes `ops.norm_fwd`."""
  assert isinstance(scale, Array) and x.group_size is not None
  n = x.qvalue.shape[-1]
  m = x.qvalue.size // n
  # On an H100, low tiles are 8 % faster if only the row layout is written.
  height = tiles.LOW if layout == "rows" else tiles.pick_height(m)
  in_rows, columns = rows.run(
    functools.partial(_fwd_kernel, height=height, interpret=interpret),
    [
      x.qvalue.reshape(m, n),
      x.scale.reshape(m, n // x.group_size),
      gamma,
      beta,
      None if stats.mean is None else stats.mean.reshape(m),
      stats.rstd.reshape(m),
      scale.reshape(1),
    ],
    tiles.operand(m, n, E4M3, layout),
    grid=tiles.grid(m, n, height),
    scratch_types=[row_ptx.scratch(height)],
    interpret=interpret,
    kernel_name="norm_fwd",
  )
  return Operand(tiles.like(in_rows, x.qvalue), columns, scale)


def _fwd_kernel(*refs, height, interpret):
  *refs, rows_gmem, columns_gmem, smem = refs
  q_gmem, scales_gmem, gamma_gmem, beta_gmem, *refs = refs
  mean_gmem, rstd_gmem, scale_gmem = refs
  place = tiles.place_of(q_gmem.shape, height)
  y = tiles.load_quantized(q_gmem, scales_gmem, place, interpret)
  if mean_gmem is not None:
    y = y - tiles.load_per_row(mean_gmem, place)
  y = y * tiles.load_per_row(rstd_gmem, place)
  if gamma_gmem is not None:
    y = y * tiles.load_per_column(gamma_gmem, place)
  if beta_gmem is not None:
    y = y + tiles.load_per_column(beta_gmem, place)
  codes = tiles.quantize(y, scale_gmem[0], E4M3, interpret)
  tiles.store_operand(place, codes, rows_gmem, columns_gmem, smem, interpret)
