# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token: applies the temperature, then top_k, then top_p."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import (
  COUNT,
  NOT_NEGATIVE,
  Range,
  check_number,
  check_whole,
)

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
# Chosen instead of a token if the largest logit is NaN or infinite.
NO_TOKEN = -1


class Sampling(NamedTuple):
  """Sampling options, as arrays so that new values cause no recompilation.

  None turns an option off; without a temperature, argmax chooses the token.
  """

  temperature: Array | None = None
  top_k: Array | None = None
  top_p: Array | None = None


def make_sampling(
  temperature: float, top_k: int | None, top_p: float | None
) -> Sampling:
  """Checks the options of `generate`, and converts them to arrays."""
  op, remedy = "generate", "0 chooses the most probable token"
  check_number(op, "temperature", temperature, NOT_NEGATIVE, remedy)
  remedy = "leave it out to draw from all tokens"
  if top_k is not None:
    check_whole(op, "top_k", top_k, COUNT, remedy)
  if top_p is not None:
    check_number(op, "top_p", top_p, Range(1.2e-38, 1), remedy)
  if temperature == 0 and not (top_k is None and top_p is None):
    raise ValueError(
      "generate: top_k and top_p apply to sampling, got temperature 0, which "
      "chooses the most probable token; leave both out, or raise temperature"
    )
  if temperature < _SMALLEST:  # Subnormal or 0 in f32.
    return Sampling()
  return Sampling(
    temperature=jnp.float32(temperature),
    top_k=None if top_k is None else jnp.int32(top_k),
    # top_p = 1 must keep all tokens, but the f32 sum of probabilities may round
    # to 1 before the last token.
    top_p=None if top_p in (None, 1) else jnp.float32(top_p),
  )


def kept(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
  """Masks the tokens that cannot be drawn.

  Returns logits f32 [B, V] and their token ids, int32 [B, V]. The largest logit
  is subtracted from all logits, which are then divided by the temperature.
  Masked tokens get -inf. If top_k or top_p is set, logits are in descending
  order, and equal logits are ordered by token id.
  """
  assert sampling.temperature is not None
  largest = jnp.max(logits, axis=-1, keepdims=True)
  logits = logits - largest
  tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1])[None], logits.shape)
  if sampling.top_k is None and sampling.top_p is None:
    return logits / sampling.temperature, tokens
  # Sort before dividing: a temperature of 1e38 makes close logits equal.
  tokens = jnp.argsort(logits, axis=-1, stable=True, descending=True)
  logits = jnp.take_along_axis(logits, tokens, axis=-1) / sampling.temperature
  if sampling.top_k is not None:
    rank = jnp.arange(logits.shape[-1])[None]
    logits = jnp.where(rank < sampling.top_k, logits, -jnp.inf)
  if sampling.top_p is not None:
    p = jax.nn.softmax(logits, axis=-1)
    # A token's sum excludes the token, so that the first token is always kept.
    before = jnp.cumsum(p, axis=-1) - p
    logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)
  return logits, tokens


def choose(logits: Array, sampling: Sampling, keys: Array) -> Array:
  """Chooses tokens int32 [B]; `NO_TOKEN` if the largest logit is not finite."""
  is_finite = jnp.isfinite(jnp.max(logits, axis=-1))
  if sampling.temperature is None:
    chosen = jnp.argmax(logits, axis=-1)
  else:
    logits, tokens = kept(logits, sampling)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    chosen = jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]
  return jnp.where(is_finite, chosen, NO_TOKEN).astype(jnp.int32)
