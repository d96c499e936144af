# SPDX-License-Identifier: Apache-2.0
"""Second moments that are stored as the means of their rows and columns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import Encoded, Plain, divided

# A leaf is factored only if its rows and its columns are at least this long.
_SHORTEST = 8
# Layers may be stacked along the first of three or more axes if it is shorter.
_MOST_LAYERS = 128
_PLAIN = Plain("float32")
LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Factored:
  """Stores v [..., n] as f32 means of its rows and of its columns.

  v[i, j] decodes to rows[i] columns[j] / mean(rows), which is exact if v has
  rank one. The two longest axes are rows and columns. Of three or more axes,
  the first counts only if it has at least 128 values, because layers may be
  stacked along a shorter one. `Encoded.amax` contains the means of rows, and
  `range` the means of columns, both with size 1 along the averaged axis.
  `codes` is a scalar zero. Leaves without two such axes of at least 8 are
  stored by `Plain` in f32.

  Encoding the decoded v gives the same means again, up to f32 rounding. So
  errors of averages do not accumulate over steps. Those of maxima do, as of the
  `nu_max` of AMSGrad. A NaN makes the whole matrix NaN.

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
    return Encoded(jnp.uint8(0), mean(x, column), mean(x, row))

  def zeros(self, shape: tuple[int, ...]) -> Encoded:
    """Returns the encoding of zeros, without allocating zeros of `shape`."""
    like = jax.eval_shape(
      lambda: self.encode(jnp.zeros(shape, jnp.float32), None)
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  def factors(self, encoded: Encoded) -> tuple[Array, Array]:
    """Returns two arrays whose product is the decoded v; v must be factored."""
    _, rows, columns = encoded
    # Along the axis of rows, `rows` is long, but `columns` has size 1.
    row = max(range(rows.ndim), key=lambda i: rows.shape[i] - columns.shape[i])
    return rows, divided(columns, mean(rows, row))

  def decode(self, encoded: Encoded) -> Array:
    if encoded.codes.dtype != jnp.uint8:
      return _PLAIN.decode(encoded)
    rows, columns = self.factors(encoded)
    return product(rows, columns)


def product(rows: Array, columns: Array) -> Array:
  """Multiplies `Factored.factors`; the largest f32 replaces infinity."""
  return jnp.minimum(rows * columns, LARGEST)


def factored_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
  """Returns the axes of rows and of columns; None if a leaf is not factored."""
  is_stack = len(shape) > 2 and shape[0] < _MOST_LAYERS
  axes = range(1 if is_stack else 0, len(shape))
  longest = sorted(axes, key=lambda i: shape[i])[-2:]
  if len(longest) < 2 or shape[longest[0]] < _SHORTEST:
    return None
  row, column = sorted(longest)
  return row, column


def mean(x: Any, axis: int) -> Array:
  """Averages f32 along an axis, which stays, with size 1."""
  # Dividing before the sum avoids an overflow.
  return jnp.sum(x * (1 / x.shape[axis]), axis, keepdims=True)
