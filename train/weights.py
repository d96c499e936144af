# SPDX-License-Identifier: Apache-2.0
"""Converts weights between f32, bf16, and bf16 plus a low byte.

`TrainConfig.params` selects the format of matrices and embeddings. Norm weights
and all biases are always f32. Layers read only the bf16 parts, so the low bytes
are stored in the optimizer's state (`LowBitsState`).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from coat_jax.optimizer import (
  LowBitsState,
  join_weights,
  split_weights,
  weights,
)
from coat_jax.optimizer.masks import is_norm_or_bias, leaf_paths
from coat_jax.optimizer.state import FusedState

Stored = Literal["float32", "bfloat16", "bfloat16_low8"]


def high_of(stored: Stored) -> Callable[[str, jax.Array], jax.Array]:
  """Builds a function of (path, f32 array) that returns the stored parameter.

  With bfloat16_low8, this is the bf16 part; `low_of` returns the low bytes.
  """

  def high(path, x):
    if is_norm_or_bias(path, x):
      return x
    if stored == "bfloat16_low8":
      return weights.split(x).high
    return x.astype(stored)

  return high


def low_of(path: str, x: jax.Array) -> jax.Array:
  """Returns a parameter's low bytes; zeros for norms and biases."""
  if is_norm_or_bias(path, x):
    return jnp.zeros_like(x, dtype=jnp.int8)
  return weights.split(x).low


def store(stored: Stored, params: Any) -> tuple[Any, Any]:
  """Converts f32 weights to `stored`; returns (weights, low bytes or None)."""
  if stored == "bfloat16_low8":
    return split_weights(params)
  high = high_of(stored)
  leaves = [high(path, leaf) for path, leaf in leaf_paths(params)]
  return jax.tree.unflatten(jax.tree.structure(params), leaves), None


def load(params: Any, low: Any) -> Any:
  """Converts stored weights to f32; inverts `store`, except for rounding."""
  if low is None:
    return in_f32(params)
  own = {name: params[name] for name in low}
  others = {name: x for name, x in params.items() if name not in own}
  return in_f32(others) | join_weights(own, low)


def in_f32(tree: Any) -> Any:
  """Casts all arrays of a tree to f32."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def draw(
  stored: Stored,
  draw_params: Callable[..., Any],
  with_moments: Callable[[Any], Any],
) -> Any:
  """Builds the initial state, with weights from `draw_params`.

  `draw_params()` samples or loads the weights in f32. `draw_params(convert)`
  returns `convert(path, weight)` instead of each f32 weight.
  """
  if stored == "float32":
    return with_moments(draw_params())
  state = with_moments(draw_params(high_of(stored)))
  inner, zeros = without_low(state.optimizer)
  if zeros is None:
    return state
  drawn = draw_params(low_of)
  low = {name: drawn[name] for name in zeros}
  # Parameters without low bytes have a scalar zero instead.
  low = jax.tree.map(lambda zero, low: low if zero.ndim else zero, zeros, low)
  return state._replace(optimizer=with_low(inner, low))


def abstract(stored: Stored, params: Any) -> Any:
  """Changes abstract parameters to the dtypes that `stored` selects."""
  dtype = "float32" if stored == "float32" else "bfloat16"
  leaves = [
    leaf.update(dtype="float32" if is_norm_or_bias(path, leaf) else dtype)
    for path, leaf in leaf_paths(params)
  ]
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


def without_low(optimizer: FusedState) -> tuple[Any, Any]:
  """Returns the state without low bytes, and the low bytes or None."""
  if isinstance(optimizer, LowBitsState):
    return optimizer.inner, optimizer.low
  return optimizer, None


def with_low(inner: Any, low: Any) -> Any:
  """Adds low bytes to an optimizer's state; with None, changes nothing."""
  return inner if low is None else LowBitsState(low, inner)
