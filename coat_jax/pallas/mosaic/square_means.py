# SPDX-License-Identifier: Apache-2.0
"""Means of the rows and of the columns of g^2, in one pass over memory.

XLA would read g twice. A program reads those tiles of a strip (see `factors`)
that have the same columns. It writes the mean of each group of 128 values, and
one tile of partial column means. XLA adds up the partial means of all programs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.codecs.group import Encoded
from coat_jax.numerics.formats import with_finite_square
from coat_jax.numerics.qtensor import num_groups
from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.factors import Sizes
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE, LAYOUT, ROWS, TILE
from coat_jax.pallas.mosaic.registers import Instructions

# If each program reads more tiles, fewer partial means are written. But with
# too few programs, multiprocessors would be idle at the end.
_MOST_TILES = 32
_LEAST_PROGRAMS = 2048


def run(
  g: Array, grad_scale: Array | None, like: Encoded, interpret: bool
) -> tuple[Array, Array]:
  """Returns `factored.means` of (g * grad_scale)^2, in the shapes of `like`."""
  sizes, count = Sizes.of(like), g.size // (GROUP_SIZE * ROWS)
  most = max(1, min(_MOST_TILES, count // _LEAST_PROGRAMS))
  chunks = num_groups(sizes.periods, most)
  tiles = num_groups(sizes.periods, chunks)
  scale = None if grad_scale is None else grad_scale[None]
  rows, parts = _means(
    g.reshape(-1, GROUP_SIZE), scale, sizes, tiles, interpret
  )
  parts = parts.reshape(
    -1, chunks * sizes.period_rows, sizes.columns * GROUP_SIZE
  )
  columns = jnp.sum(parts, axis=1)
  return rows.reshape(like.amax.shape), columns.reshape(like.range.shape)


@functools.partial(jax.jit, static_argnames=("sizes", "tiles", "interpret"))
def _means(g, scale, sizes: Sizes, tiles: int, interpret: bool):
  chunks = num_groups(sizes.periods, tiles)
  strips = g.shape[0] // (sizes.rows * sizes.columns)
  programs = strips * chunks * (sizes.period // ROWS)
  out = (g.shape[0],), (programs * ROWS, GROUP_SIZE)
  return plgpu.kernel(
    functools.partial(
      _kernel, sizes=sizes, tiles=tiles, on=Instructions(interpret)
    ),
    out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out],
    grid=(programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
  )(g, *([] if scale is None else [scale]))


def _kernel(g_gmem, *gmem, sizes: Sizes, tiles: int, on: Instructions) -> None:
  """Adds up a program's tiles, which are a period apart.

  `g_gmem` is [groups, 128]. `gmem` holds the gradient's factor (if any), the
  means of groups [groups], and partial means of columns [programs * 8, 128].
  """
  *scale_gmem, means_gmem, columns_gmem = gmem
  program = lax.axis_index("program")
  chunk, tile = divmod(program, sizes.period // ROWS)
  strip, chunk = divmod(chunk, num_groups(sizes.periods, tiles))
  first = strip * sizes.periods + chunk * tiles
  first = first * sizes.period + tile * ROWS
  count = tiles
  if sizes.periods % tiles:  # Programs of the last chunk have fewer tiles.
    count = jnp.minimum(tiles, sizes.periods - chunk * tiles)

  def add(i, total):
    start = first + i * sizes.period
    g = on.in_f32(registers.load(registers.part(g_gmem, start)))
    for ref in scale_gmem:
      g = g * ref[0]
    g = with_finite_square(g)
    # Divide before summing, to avoid an overflow.
    means = jnp.sum(g * g * (1 / GROUP_SIZE), axis=1)
    registers.store(means_gmem, start, means)
    return total + g * g * (1 / sizes.rows)

  zeros = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), LAYOUT)
  total = lax.fori_loop(0, count, add, zeros)
  registers.store(columns_gmem, program * ROWS, total)
