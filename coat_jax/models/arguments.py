# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of models: configurations, tokens, images."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from coat_jax.layers.module import check_recipe
from coat_jax.numerics.checks import (
  check_array,
  check_float_dtype,
  check_function,
  check_kind,
  refuse,
)

# The dtype of each array that is passed with tokens, and words for the dtype.
_KINDS = {
  "segments": (jnp.integer, "integers"),
  "shares": (jnp.floating, "floats"),
  "is_target": ((jnp.bool_, jnp.number), "booleans or numbers"),
}


def check_model(
  op: str, config: Any, kind: type, recipe: Any, dtype: Any, store: Any, rngs
) -> None:
  """Raises a TypeError if an argument of a model's constructor is wrong."""
  remedy = f"pass one, as in {kind.__name__}(...)"
  check_kind(op, "config", config, kind, remedy)
  check_recipe(op, recipe)
  check_float_dtype(op, "dtype", dtype)
  if store is not None:
    check_function(op, "store", store, "pass (path, array) -> array, or None")
  check_kind(op, "rngs", rngs, nnx.Rngs, "pass nnx.Rngs(0)")


def check_tokens(op: str, tokens: Any, segments: Any) -> None:
  """Raises an error unless tokens and segments, if any, are int [B, T]."""
  rule, kind = "int [B, T] with T at least 1", jnp.integer
  remedy = "pass token ids of sequences that all have the same length"
  check_array(op, "tokens", tokens, rule, ndim=2, kind=kind, remedy=remedy)
  if not tokens.shape[1]:
    refuse(ValueError, op, "tokens", rule, tokens, remedy)
  if segments is not None:
    check_like(op, "segments", segments, tokens.shape)


def check_like(op: str, name: str, x: Any, shape: tuple[int, ...]) -> None:
  """Raises an error unless x has `shape` and the dtype in `_KINDS[name]`."""
  kind, words = _KINDS[name]
  remedy = "pass one value for each token"
  rule = f"{words} with the shape of tokens"
  check_array(op, name, x, rule, kind=kind, remedy=remedy)
  if x.shape != shape:
    raise ValueError(
      f"{op}: {name} must have the shape of tokens, {shape}, got {x.shape}; "
      f"{remedy}"
    )


def check_hidden(op: str, hidden: Any, width: int) -> None:
  """Raises an error unless `hidden` is a floating-point array [B, T, width]."""
  rule = f"a floating-point array [B, T, {width}]"
  remedy = "pass what the model returned"
  check_array(op, "hidden", hidden, rule, ndim=3, remedy=remedy)
  if hidden.shape[-1] != width:
    refuse(ValueError, op, "hidden", rule, hidden, remedy)


def check_pixels(op: str, pixel_values: Any) -> None:
  """Raises a TypeError unless images are a floating-point array."""
  rule = "a floating-point array"
  remedy = "normalize them as the model's processor does"
  check_array(op, "pixel_values", pixel_values, rule, remedy=remedy)
