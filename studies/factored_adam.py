# SPDX-License-Identifier: Apache-2.0
"""Adam that stores second moments as means of rows and columns (factored).

Combine it with `coat_jax.encoded` to store first moments in a codec. The means
are f32 and occupy 4 (rows + columns) bytes per matrix. Factoring cannot be a
codec, because each decoded value depends on the whole matrix, not on a group.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

# A leaf is not factored if its second largest axis is shorter than this.
_SHORTEST = 32
_EPS = 1e-30


class FactoredAdamState(NamedTuple):
  """The state of `scale_by_factored_adam`."""

  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu: Any
  rows: Any  # Means over the largest axis, or all of v if it is not factored.
  columns: Any  # Means over the second largest axis, or a scalar 0.


def factored_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
  """Returns the two largest axes (row, column); None for small leaves."""
  if len(shape) < 2:
    return None
  row, column = sorted(range(len(shape)), key=lambda i: shape[i])[-2:]
  return (row, column) if shape[row] >= _SHORTEST else None


def factors(v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the means of v's rows and columns, or v and 0 for small leaves."""
  axes = factored_axes(v.shape)
  if axes is None:
    return v, jnp.zeros([], v.dtype)
  row, column = axes
  return jnp.mean(v, column, keepdims=True), jnp.mean(v, row, keepdims=True)


def product(rows: jax.Array, columns: jax.Array) -> jax.Array:
  """Approximates v by the means of its rows and columns."""
  if not columns.ndim:
    return rows
  shape = jnp.broadcast_shapes(rows.shape, columns.shape)
  axes = factored_axes(shape)
  assert axes is not None
  mean = jnp.mean(rows, axes[0], keepdims=True)
  return rows * columns / jnp.maximum(mean, _EPS)


def scale_by_factored_adam(
  b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
  """Returns Adam with second moments of rank one, as in Adafactor.

  Unlike Adafactor, it corrects the bias of both moments like Adam, and does not
  clip updates. Source: arXiv:1804.04235, algorithm 4.
  """

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    rows, columns = _split(jax.tree.map(factors, zeros), params)
    return FactoredAdamState(jnp.zeros([], jnp.int32), zeros, rows, columns)

  def update(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)

    def one(g, m, rows, columns):
      m = b1 * m + (1 - b1) * g
      new = factors(jnp.square(g) + _EPS)
      rows, columns = (
        b2 * old + (1 - b2) * x
        for old, x in zip((rows, columns), new, strict=True)
      )
      v = product(rows, columns) / (1 - b2**count)
      return m / (1 - b1**count) / (jnp.sqrt(v) + eps), m, rows, columns

    moments = state.mu, state.rows, state.columns
    new = jax.tree.map(one, updates, *moments)
    out, *rest = _split(new, updates)
    return out, FactoredAdamState(count, *rest)

  return optax.GradientTransformation(init, update)


def bytes_of(shape: tuple[int, ...]) -> int:
  """Counts the bytes of the means of a second moment of this shape."""
  rows, columns = jax.eval_shape(
    factors, jax.ShapeDtypeStruct(shape, jnp.float32)
  )
  return 4 * (math.prod(rows.shape) + math.prod(columns.shape))


def _split(rows: Any, like: Any) -> tuple[Any, ...]:
  """Turns a tree of tuples into a tuple of trees."""
  leaves = jax.tree.structure(like).flatten_up_to(rows)
  columns = zip(*leaves, strict=True)
  return tuple(jax.tree.structure(like).unflatten(x) for x in columns)
