# SPDX-License-Identifier: Apache-2.0
"""Second moments that are stored as the means of their rows and columns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import Encoded, Plain, divided

# A leaf is not factored if the shorter of its two axes is shorter than this.
_SHORTEST = 32
_PLAIN = Plain("float32")
_LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Factored:
  """Stores v [..., n] as f32 means of its rows and of its columns.

  v[i, j] decodes to rows[i] columns[j] / mean(rows), which is exact if v has
  rank one. Rows and columns are the two longest axes, not counting the first of
  three or more axes, which may be that of stacked layers. `Encoded.amax`
  contains the means of rows, and `range` those of columns; both keep axes of
  size 1. There are no codes. Leaves without two axes of at least 32 are stored
  like `Plain`.

  A decay of v and its encoding commute, so an optimizer's step rounds v only to
  f32. A NaN makes the whole matrix NaN.

  Source: arXiv:1804.04235, section 3.
  """

  @property
  def needs_noise(self) -> bool:
    return False

  def encode(self, x: Array, noise: Array | None) -> Encoded:
    axes = factored_axes(x.shape)
    if axes is None:
      return _PLAIN.encode(x, noise)
    row, column = axes
    return Encoded(jnp.uint8(0), _mean(x, column), _mean(x, row))

  def zeros(self, shape: tuple[int, ...]) -> Encoded:
    """Encodes zeros of this shape, without computing them."""
    like = jax.eval_shape(
      lambda: self.encode(jnp.zeros(shape, jnp.float32), None)
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  def factors(self, encoded: Encoded) -> tuple[Array, Array]:
    """Returns two arrays whose product is v, if it was factored."""
    _, rows, columns = encoded
    # Both axes are longer than 1, but the means of columns have one row.
    row = max(range(rows.ndim), key=lambda i: rows.shape[i] - columns.shape[i])
    return rows, divided(columns, _mean(rows, row))

  def decode(self, encoded: Encoded) -> Array:
    if encoded.codes.ndim:
      return _PLAIN.decode(encoded)
    rows, columns = self.factors(encoded)
    return product(rows, columns)


def product(rows: Array, columns: Array) -> Array:
  """Multiplies `Factored.factors`; the largest f32 replaces infinity."""
  return jnp.minimum(rows * columns, _LARGEST)


def factored_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
  """Returns the axes of rows and of columns; None if a leaf is not factored."""
  axes = range(1 if len(shape) > 2 else 0, len(shape))
  longest = sorted(axes, key=lambda i: shape[i])[-2:]
  if len(longest) < 2 or shape[longest[0]] < _SHORTEST:
    return None
  row, column = sorted(longest)
  return row, column


def _mean(x: Any, axis: int) -> Array:
  # Dividing before the sum avoids an overflow.
  return jnp.sum(x * (1 / x.shape[axis]), axis, keepdims=True)
