# SPDX-License-Identifier: Apache-2.0
"""Quantizes the input of an activation function, in Mosaic GPU.

`activation_input` also finds the scale of the output, f(x) or f(gate) * up. For
a gated function, x [m, 2 F] is gate and up concatenated.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import VALUES, Groups, Scaling
from coat_jax.ops.activation import Parts
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import Activation
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import device, row_ptx, rows, scales, tiles
from coat_jax.pallas.mosaic.activation import activated, load_factor, times
from coat_jax.pallas.mosaic.row_ptx import COLUMNS
from coat_jax.pallas.mosaic.rows import Load


@dataclasses.dataclass(frozen=True)
class _BlockLoad(Load):
  """Loads 8 rows of 128 columns as [8, 128 / size, size]."""

  @property
  def count(self) -> int:
    """The number of rows per load."""
    return rows.STEP // COLUMNS

  @property
  def layout(self):
    shape, count = (COLUMNS // self.size, self.size), self.count
    return plgpu.Layout.TILED(
      plgpu.Tiling(
        ((count, *shape), (count // row_ptx.WARPS, *shape), (self.vector,))
      ),
      warp_dims=(-7,),
      lane_dims=(-4, -3, -2),
      vector_dim=-1,
    )


def _why_not_input(x, gated, **options) -> str | None:
  width = x.shape[-1] // (1 + gated)
  return (
    device.why_not_conversions()
    or supported.why_not_activation_input(x, gated=gated, **options)
    or tiles.why_not((*x.shape[:-1], width))
  )


@kernel(_why_not_input)
@jax.jit(
  static_argnames=("activation", "gated", "groups", "output", "interpret")
)
def activation_input(
  x: Array,
  *,
  activation: Activation,
  gated: bool,
  groups: Groups,
  output: Scaling = VALUES,
  factor: Array | None = None,
  interpret: bool = False,
) -> tuple[Parts, Array | None]:
  """Computes `ops.activation_input`."""
  *leading, n = x.shape
  count, g = 1 + gated, groups.size
  m, f = x.size // n, n // count
  # Mosaic supports no axis of size 1, so groups of 128 need another layout.
  load = Load(g) if g == COLUMNS else _BlockLoad(g)
  height = (2 if gated else 4) * load.count  # 32 values per thread.
  programs = pl.cdiv(m, height) * pl.cdiv(f, COLUMNS)
  *quantized, bits = rows.run(
    functools.partial(
      _input_kernel,
      load=load,
      height=height,
      activation=activation,
      interpret=interpret,
    ),
    [x.reshape(m, n // g, g), None if factor is None else factor.reshape(m)],
    [
      jax.ShapeDtypeStruct((m, f // g, g), E4M3),
      jax.ShapeDtypeStruct((m, f // g), jnp.bfloat16),
    ]
    * count
    + [scales.maxima(programs)],
    grid=(programs,),
    interpret=interpret,
    kernel_name="activation_input",
  )
  parts = tuple(
    QTensor(codes.reshape(*leading, f), scale.reshape(*leading, f // g), g)
    for codes, scale in itertools.batched(quantized, 2)
  )
  return parts, scales.output_scale(bits, output, interpret)


def _input_kernel(
  x_gmem, factor_gmem, *refs, load, height, activation, interpret
):
  *refs, bits_gmem = refs
  outputs = list(itertools.batched(refs, 2))
  m, n, g = outputs[0][0].shape
  program, width = lax.axis_index("last"), COLUMNS // g
  # Consecutive programs go along a row.
  across = jnp.int32(pl.cdiv(n, width))
  row = rows.part_at(lax.div(program, across), height, m)
  group = rows.part_at(lax.rem(program, across), width, n).start

  def groups(first):
    return first if width == 1 else pl.ds(first, width)

  loaded = [
    rows.load_groups(x_gmem.at[row, groups(group + i * n)], load)
    for i in range(len(outputs))
  ]
  place = row, groups(group)
  layout = load.layout.reduce(range(1, loaded[0].ndim))
  factor = load_factor(factor_gmem, row, layout)
  parts = []
  for x, (q_gmem, scale_gmem) in zip(loaded, outputs, strict=True):
    codes, scale = rows.quantize_groups(x, q_gmem.dtype, load, interpret)
    rows.store(q_gmem.at[place], codes)
    rows.store(scale_gmem.at[place], scale.astype(scale_gmem.dtype))
    parts.append(rows.dequantize_groups(codes, scale))
  y = times(activated(parts, activation, load.layout, interpret), factor)
  scales.store_maximum(bits_gmem, program, rows.amax_bits(y, load.count))
