# SPDX-License-Identifier: Apache-2.0
"""Computes the random words of `stochastic.random_words` in kernels."""

import jax.numpy as jnp
from jax import Array, lax

from coat_jax.numerics.stochastic import GOLDEN, RUN, mix, times_power
from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE
from coat_jax.pallas.mosaic.registers import as_float


def row_and_column(start, shape, whole, place_gmem) -> tuple[Array, Array]:
  """Returns each group's row and first column in the whole leaf.

  `shape` is the shape of the kernel's part of the leaf, `start` is the index of
  the tile's first group in this part, and `whole` is `LeafPart.whole`.
  """
  groups_per_row = shape[-1] // GROUP_SIZE
  row = registers.iota(0) + start.astype(jnp.uint32)
  column = jnp.zeros_like(row)
  if groups_per_row > 1:
    row, group = _divide(row, groups_per_row)
    column = group * jnp.uint32(GROUP_SIZE)
  if whole is None:
    return row, column
  begins = [place_gmem[1 + axis] for axis in range(len(shape))]
  rest, row, stride = row, jnp.zeros_like(row), 1
  for axis in range(len(shape) - 2, -1, -1):
    rest, index = _divide(rest, shape[axis]) if axis else (rest, rest)
    row = row + (index + begins[axis]) * jnp.uint32(stride % 2**32)
    stride *= whole[axis]
  return row, column + begins[-1]


def _divide(x: Array, by: int) -> tuple[Array, Array]:
  quotient = lax.div(x, jnp.uint32(by))
  return quotient, x - quotient * jnp.uint32(by)


def random_words(row: Array, column: Array, key) -> Array:
  """Computes `stochastic.random_words` for groups at these rows and columns."""
  # A lane's 8 values form one run of `RUN` values, so the compiler computes
  # everything except the last multiplication once per lane.
  golden = jnp.uint32(GOLDEN)
  row_word = mix(row * golden + key) + (column // RUN) * golden
  inside = registers.iota(1)
  word = mix((inside // RUN) * golden + registers.spread(row_word))
  return times_power(word, inside)


def mantissas(words: Array) -> Array:
  """Returns 1 + `stochastic.uniform(words)`."""
  return as_float((words >> 9) + jnp.uint32(0x3F800000))
