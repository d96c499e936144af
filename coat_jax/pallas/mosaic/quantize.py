# SPDX-License-Identifier: Apache-2.0
"""Quantizes arrays to FP8, per group or per tensor, in Mosaic GPU.

  quantize_groups   code = x / scale, where each group of 1 x G values has
                    scale = amax / qmax, rounded up to BF16
  tensor_scale      scale = amax / qmax for the whole tensor
  quantize_tensor   code = clip(x / scale), in the row layout, the column layout
                    (transposed) or both

Kernels that write the column layout process tiles (see `tiles`). All others
treat x as one list of groups.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
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
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import device, row_ptx, rows, tiles
from coat_jax.pallas.mosaic.scales import (
  bits_to_scale,
  bits_to_shared_scale,
  maxima,
  store_maximum,
)

# --- Per group ---------------------------------------------------------------


def _why_not_groups(x, groups, **_) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_format(groups.dtype, E4M3, E5M2)
    or supported.why_not_dtype(x.dtype)
    or supported.why_not_groups(x.shape, groups.size)
    or rows.why_not_list(x.shape)
  )


@kernel(_why_not_groups)
@jax.jit(static_argnames=("groups", "interpret"))
def quantize_groups(
  x: Array, *, groups: Groups, interpret: bool = False
) -> QTensor:
  """Computes `ops.quantize_groups`."""
  *leading, n = x.shape
  size = rows.pick_size(x.size)
  shape = x.size // groups.size, groups.size
  qvalue, scale = rows.run(
    functools.partial(
      _groups_kernel, count=size // groups.size, interpret=interpret
    ),
    [x.reshape(shape)],
    [
      jax.ShapeDtypeStruct(shape, groups.dtype),
      jax.ShapeDtypeStruct(shape[:1], jnp.bfloat16),
    ],
    grid=(pl.cdiv(x.size, size),),
    interpret=interpret,
    kernel_name="quantize_groups",
  )
  scale = scale.reshape(*leading, n // groups.size)
  return QTensor(qvalue.reshape(x.shape), scale, groups.size)


def _groups_kernel(x_gmem, q_gmem, scale_gmem, *, count, interpret):
  part = rows.part("last", count, x_gmem.shape[0])
  load = rows.Load(x_gmem.shape[1])
  x = rows.load_groups(x_gmem.at[part], load)
  codes, scale = rows.quantize_groups(x, q_gmem.dtype, load, interpret)
  rows.store(q_gmem.at[part], codes)
  rows.store(scale_gmem.at[part], scale.astype(scale_gmem.dtype))


# --- Per tensor --------------------------------------------------------------


def _why_not_tensor(x, scaling, layout: Layout = "rows", **_) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_scaling(scaling, E4M3, E5M2)
    or supported.why_not_dtype(x.dtype)
    or supported.why_not_shape(x.shape)
    or supported.why_not_columns(x.shape, layout)
    or rows.why_not_list(x.shape)
    or (None if layout == "rows" else tiles.why_not(x.shape))
  )


@kernel(_why_not_tensor)
@jax.jit(static_argnames=("scaling", "interpret"))
def tensor_scale(
  x: Array,
  *,
  scaling: Scaling = VALUES,
  interpret: bool = False,
) -> Array:
  """Computes `ops.tensor_scale`, from one maximum per program."""
  return bits_to_scale(_maxima(x, interpret), scaling, interpret)


def _maxima(x: Array, interpret: bool) -> Array:
  # The more values a program reads, the fewer maxima `scales` must combine.
  size = rows.pick_size(x.size, loads=8)
  programs = pl.cdiv(x.size, size)
  [bits] = rows.run(
    functools.partial(_amax_kernel, count=size // rows.ANY.size),
    [x.reshape(-1, rows.ANY.size)],
    [maxima(programs)],
    grid=(programs,),
    interpret=interpret,
    kernel_name="tensor_amax",
  )
  return bits


def _amax_kernel(x_gmem, bits_gmem, *, count):
  part = rows.part("last", count, x_gmem.shape[0])
  bits = rows.amax_bits(
    rows.load_groups(x_gmem.at[part], rows.ANY), rows.ANY.count
  )
  store_maximum(bits_gmem, lax.axis_index("last"), bits)


@kernel(_why_not_tensor)
@jax.jit(static_argnames=("scaling", "layout", "interpret"))
def quantize_tensor(
  x: Array,
  *,
  scaling: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
  interpret: bool = False,
) -> Operand:
  """Computes `ops.quantize_tensor`."""
  if scale is None:
    bits = _maxima(x, interpret)
    scale, read = bits_to_shared_scale(bits, scaling, interpret)
  else:
    assert isinstance(scale, Array)
    read = scale.reshape(1)
  if layout == "rows":
    return Operand(_rows(x, read, scaling.dtype, interpret), None, scale)
  n = x.shape[-1]
  m = x.size // n
  height = tiles.pick_height(m)
  in_rows, columns = rows.run(
    functools.partial(_tiles_kernel, height=height, interpret=interpret),
    [x.reshape(m, n), read],
    tiles.operand(m, n, scaling.dtype, layout),
    grid=tiles.grid(m, n, height),
    scratch_types=[row_ptx.scratch(height)],
    interpret=interpret,
    kernel_name="quantize_tiles",
  )
  return Operand(tiles.like(in_rows, x), columns, scale)


def _tiles_kernel(
  x_gmem, scale_gmem, rows_gmem, columns_gmem, smem, *, height, interpret
):
  place = tiles.place_of(x_gmem.shape, height)
  x = tiles.load(x_gmem.at[place])
  written = columns_gmem if rows_gmem is None else rows_gmem
  codes = tiles.quantize(x, scale_gmem[0], written.dtype, interpret)
  tiles.store_operand(place, codes, rows_gmem, columns_gmem, smem, interpret)


def _rows(x: Array, scale: Array, dtype, interpret: bool) -> Array:
  size = rows.pick_size(x.size)
  shape = x.size // rows.ANY.size, rows.ANY.size
  [found] = rows.run(
    functools.partial(
      _rows_kernel, count=size // rows.ANY.size, interpret=interpret
    ),
    [x.reshape(shape), scale],
    [jax.ShapeDtypeStruct(shape, dtype)],
    grid=(pl.cdiv(x.size, size),),
    interpret=interpret,
    kernel_name="quantize_rows",
  )
  return found.reshape(x.shape)


def _rows_kernel(x_gmem, scale_gmem, rows_gmem, *, count, interpret):
  part = rows.part("last", count, x_gmem.shape[0])
  x = rows.load_groups(x_gmem.at[part], rows.ANY)
  codes = rows.quantize(
    x, scale_gmem[0], rows_gmem.dtype, rows.ANY.layout, interpret
  )
  rows.store(rows_gmem.at[part], codes)
