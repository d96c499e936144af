# SPDX-License-Identifier: Apache-2.0
"""Activation functions that read and write FP8, in Mosaic GPU.

  activation_fwd           computes y and quantizes it for the next matmul
  activation_bwd_operands  computes dx = dy f'(x) and quantizes it in the row
                           and the column layout; recomputes y and quantizes it
                           in the column layout

A gated function computes y = f(gate) up. The gradients dgate = dy up f'(gate)
and dup = dy f(gate) share one scale.

The backward pass must know the scale of dx before it writes FP8 codes. So a
first kernel bounds |dx|, given dy and the scales of x's groups. If rows have
factors (see `ops.activation`), this kernel also computes each group's part of a
factor's gradient. The second kernel writes the codes. For the gradient of a
bias, it also sums dx over every 32 rows of each tile, and XLA adds up these
sums, always in the same order.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.numerics.formats import E4M3, E5M2, qmax
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  GRADIENTS,
  VALUES,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.activation import Parts, largest_gradient
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import Activation
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import (
  activation_ptx,
  device,
  row_ptx,
  rows,
  scales,
  tiles,
)
from coat_jax.pallas.mosaic.row_ptx import COLUMNS
from coat_jax.pallas.mosaic.rows import Load


def activated(parts: list[Array], activation, layout, interpret) -> Array:
  """Computes f(x), or f(gate) up if there are two parts."""
  x, *others = parts
  y = activation_ptx.values(x, activation, layout, interpret)
  return y * others[0] if others else y


def _gradients(
  dy: Array, parts: list[Array], activation, layout, interpret
) -> tuple[list[Array], Array]:
  """Returns the gradients of all parts, and y."""
  x, *others = parts
  y, slope = activation_ptx.values_and_slopes(x, activation, layout, interpret)
  if not others:
    return [dy * slope], y
  [up] = others
  return [dy * up * slope, dy * y], y * up


def times(x: Array, factor: Array | None) -> Array:
  """Multiplies x by factors of its leading axes; a factor of 0 clears NaN."""
  if factor is None:
    return x
  factor = rows.spread(factor, x.shape)
  return jnp.where(factor == 0, 0.0, x * factor)


def _in_list(factor: Array | None, x: QTensor) -> Array | None:
  """Returns the factor of each group's row [groups]; None stays None."""
  if factor is None:
    return None
  return jnp.broadcast_to(factor, x.scale.shape).reshape(-1)


def load_factor(ref, place, layout) -> Array | None:
  if ref is None:
    return None
  return plgpu.load(ref.at[place], layout=layout, optimized=False)


def _as_groups(x: QTensor) -> list[Array]:
  """Reshapes quantized values to codes [groups, G] and scales [groups]."""
  return [x.qvalue.reshape(-1, x.group_size or 0), x.scale.reshape(-1)]


def _as_matrix(x: QTensor) -> list[Array]:
  """Reshapes quantized values to matrices of codes and of scales."""
  return [a.reshape(-1, a.shape[-1]) for a in (x.qvalue, x.scale)]


def _load_groups(refs, part, load: Load) -> list[Array]:
  """Loads and dequantizes slice `part` of each pair of refs (codes, scales)."""
  values, layout = [], load.layout.reduce(1)
  for codes_gmem, scale_gmem in itertools.batched(refs, 2):
    codes = rows.load_groups(codes_gmem.at[part], load)
    scale = plgpu.load(scale_gmem.at[part], layout=layout, optimized=False)
    values.append(rows.dequantize_groups(codes, scale.astype(jnp.float32)))
  return values


def _load_tiles(refs, place, interpret: bool) -> list[Array]:
  """Loads and dequantizes a tile of each pair of refs (codes, scales)."""
  return [
    tiles.load_quantized(codes, scale, place, interpret)
    for codes, scale in itertools.batched(refs, 2)
  ]


# --- Forward -----------------------------------------------------------------


def _why_not_fwd(parts, **options) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_activation_fwd(parts, **options)
    or rows.why_not_list(parts[0].qvalue.shape)
  )


@kernel(_why_not_fwd)
@jax.jit(static_argnames=("activation", "output", "interpret"))
def activation_fwd(
  parts: Parts,
  *,
  activation: Activation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  factor: Array | None = None,
  interpret: bool = False,
) -> Operand:
  """Computes `ops.activation_fwd`."""
  assert isinstance(scale, Array)
  like = parts[0]
  inputs = [x for part in parts for x in _as_groups(part)]
  size, shape = rows.pick_size(like.qvalue.size), inputs[0].shape
  [in_rows] = rows.run(
    functools.partial(
      _fwd_kernel,
      count=size // shape[1],
      activation=activation,
      interpret=interpret,
    ),
    [_in_list(factor, like), *inputs, scale.reshape(1)],
    [jax.ShapeDtypeStruct(shape, E4M3)],
    grid=(pl.cdiv(like.qvalue.size, size),),
    interpret=interpret,
    kernel_name="activation_fwd",
  )
  return Operand(in_rows.reshape(like.qvalue.shape), None, scale)


def _fwd_kernel(factor_gmem, *refs, count, activation, interpret):
  *refs, scale_gmem, rows_gmem = refs
  groups, g = rows_gmem.shape
  part, load = rows.part("last", count, groups), Load(g)
  factor = load_factor(factor_gmem, part, load.layout.reduce(1))
  parts = _load_groups(refs, part, load)
  y = times(activated(parts, activation, load.layout, interpret), factor)
  codes = rows.quantize(y, scale_gmem[0], E4M3, load.layout, interpret)
  rows.store(rows_gmem.at[part], codes)


# --- Backward ----------------------------------------------------------------


def _why_not_bwd(dy, **options) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_activation_bwd(dy, **options)
    or tiles.why_not(dy.shape)
  )


@kernel(_why_not_bwd)
@jax.jit(
  static_argnames=("activation", "gradient", "output", "has_sums", "interpret")
)
def activation_bwd_operands(
  dy: Array,
  parts: Parts,
  *,
  activation: Activation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  factor: Array | None = None,
  has_sums: bool = False,
  interpret: bool = False,
) -> tuple[Operand, Operand, Array | None, Array | None]:
  """Computes `ops.activation_bwd_operands`, in two kernels."""
  assert isinstance(scale, Array)
  how = dict(activation=activation, interpret=interpret)
  *leading, f = dy.shape
  m, n = dy.size // f, len(parts) * f
  inputs = [x for part in parts for x in _as_groups(part)]
  size, shape = rows.pick_size(dy.size), inputs[0].shape
  programs = pl.cdiv(dy.size, size)
  of_groups = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
  bits, dfactor = rows.run(
    functools.partial(_bound_kernel, count=size // shape[1], **how),
    [dy.reshape(shape), _in_list(factor, parts[0]), *inputs],
    [scales.maxima(programs), None if factor is None else of_groups],
    grid=(programs,),
    interpret=interpret,
    kernel_name="activation_bwd_bound",
  )
  dx_scale, read = scales.bits_to_shared_scale(bits, gradient, interpret)
  # GPUs other than Hopper may lack the shared memory for tiles of 64 rows.
  is_hopper = device.why_not_hopper() is None
  height = tiles.pick_height(m) if is_hopper or interpret else tiles.LOW
  grid = tiles.grid(m, f, height)
  in_rows, columns, y, sums = tiles.run(
    functools.partial(_bwd_kernel, count=len(parts), height=height, **how),
    [
      dy.reshape(m, f),
      None if factor is None else factor.reshape(m),
      *(x for part in parts for x in _as_matrix(part)),
      read,
      scale.reshape(1),
    ],
    [
      *tiles.operand(m, n, E5M2, "both"),
      jax.ShapeDtypeStruct((f, m), E4M3),
      jax.ShapeDtypeStruct((grid[1] * height // tiles.LOW, f), jnp.float32)
      if has_sums
      else None,
    ],
    grid=grid,
    # With a gate, five would spill.
    warpgroups=4 if len(parts) == 2 else 5,
    scratch_types=[row_ptx.SUMS] * has_sums
    + [row_ptx.scratch(height)] * (len(parts) + 1),
    interpret=interpret,
    kernel_name="activation_bwd_operands",
  )
  assert in_rows is not None
  if sums is not None:
    sums = jnp.sum(sums, axis=0)
  if dfactor is not None:
    dfactor = jnp.sum(dfactor.reshape(*leading, -1), axis=-1, keepdims=True)
  dx = Operand(in_rows.reshape(*leading, n), columns, dx_scale)
  return dx, Operand(None, y, scale), sums, dfactor


def _bound_kernel(dy_gmem, factor_gmem, *refs, count, activation, interpret):
  *refs, bits_gmem, dfactor_gmem = refs
  groups, g = dy_gmem.shape
  part, load = rows.part("last", count, groups), Load(g)
  layout = load.layout.reduce(1)
  dy = rows.load_groups(dy_gmem.at[part], load)
  factor = load_factor(factor_gmem, part, layout)
  magnitudes = [
    _load_magnitudes(codes_gmem.dtype, scale_gmem.at[part], layout)
    for codes_gmem, scale_gmem in itertools.batched(refs, 2)
  ]
  largest = largest_gradient(jnp.max(jnp.abs(dy), axis=1), magnitudes)
  if factor is not None:
    largest = times(largest, jnp.abs(factor))
    parts = _load_groups(refs, part, load)
    y = activated(parts, activation, load.layout, interpret)
    rows.store(dfactor_gmem.at[part], jnp.sum(dy * y, axis=1))
  bits = rows.amax_bits(largest, load.count)
  scales.store_maximum(bits_gmem, lax.axis_index("last"), bits)


def _load_magnitudes(dtype, scale_gmem, layout) -> Array:
  """Returns the largest magnitudes that groups with these scales may have."""
  scale = plgpu.load(scale_gmem, layout=layout, optimized=False)
  return scale.astype(jnp.float32) * qmax(dtype)


def _bwd_kernel(
  index, dy_gmem, factor_gmem, *refs, count, height, activation, interpret
):
  refs, smems = refs[: -count - 1], refs[-count - 1 :]
  refs, sums_smem = refs[: 2 * count + 6], refs[2 * count + 6 :]
  *refs, rows_gmem, columns_gmem, output_gmem, sums_gmem = refs
  *refs, scale_gmem, output_scale_gmem = refs
  m, n = dy_gmem.shape
  row, column = tiles.place_of((m, n), height, index)

  columns = [pl.ds(column.start + i * n, COLUMNS) for i in range(count)]
  for start in range(0, height, tiles.LOW):
    own = pl.ds(row.start + start, tiles.LOW)
    dy = tiles.load(dy_gmem.at[own, column])
    factor = load_factor(factor_gmem, own, row_ptx.TILE_LAYOUT.reduce(1))
    parts = _load_tiles(refs, (own, column), interpret)
    if factor is not None:
      # Multiplying all gradients at the end would spill registers.
      dy, factor = times(dy, factor), rows.spread(factor, dy.shape)
      parts = [jnp.where(factor == 0, 0.0, x) for x in parts]
    dxs, y = _gradients(dy, parts, activation, row_ptx.TILE_LAYOUT, interpret)
    y = y if factor is None else y * factor
    if sums_gmem is not None:
      number = index[1] * (height // tiles.LOW) + start // tiles.LOW
      known = tiles.known_rows(m, height, index[1])
      known = None if known is None else known - start
      tiles.store_sums(
        sums_gmem, dxs[0], number, known, column, sums_smem[0], interpret
      )
    for dx, at, smem in zip(dxs, columns, smems[1:], strict=True):
      codes = tiles.quantize(dx, scale_gmem[0], E5M2, interpret)
      tiles.put(codes, smem, height, start, interpret)
      rows.store(rows_gmem.at[own, at], codes)
    codes = tiles.quantize(y, output_scale_gmem[0], E4M3, interpret)
    tiles.put(codes, smems[0], height, start, interpret)
    # Without this barrier, the compiler would load all rows of the tile first,
    # and spill registers.
    rows.barrier(interpret)
  for at, smem in zip(columns, smems[1:], strict=True):
    rows.store(
      columns_gmem.at[at, row], tiles.take(smem, height, E5M2, interpret)
    )
  rows.store(
    output_gmem.at[column, row], tiles.take(smems[0], height, E4M3, interpret)
  )
