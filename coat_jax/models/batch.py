# SPDX-License-Identifier: Apache-2.0
"""Batches of sequences for training: documents, padding and targets."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from coat_jax.models.arguments import check_like
from coat_jax.numerics.checks import check_array, is_array


class Batch(NamedTuple):
  """Sequences, each with one document or several packed documents.

  Attributes:
    tokens: int32 [B, T + 1]; each token but the first is predicted from the
      tokens before it.
    segments: int32 [B, T + 1], the index of each token's document; padding has
      an index too. Tokens attend only within their document. None if each
      sequence is one document.
    shares: f32 [B, T + 1], the weight of each token's loss. Column 0 is
      ignored. None gives equal weights to all tokens except the first of each
      document.
  """

  tokens: Array
  segments: Array | None = None
  shares: Array | None = None

  @classmethod
  def of(cls, batch: "Batch | Array") -> "Batch":
    """Converts tokens to a batch; adds missing shares if there are segments."""
    tokens, segments, shares = batch if isinstance(batch, Batch) else cls(batch)
    _check(tokens, segments=segments, shares=shares)
    if shares is None and segments is not None:
      return cls.make(tokens, segments)
    return cls(tokens, segments, shares)

  @classmethod
  def make(
    cls,
    tokens: ArrayLike,
    segments: ArrayLike | None = None,
    is_target: ArrayLike | None = None,
  ) -> "Batch":
    """Makes a batch whose targets all have the same weight.

    Args:
      tokens: int32 [B, T + 1].
      segments: int32 [B, T + 1] or None; see `Batch`.
      is_target: bool [B, T + 1], the tokens to predict; the first token of a
        document is never predicted. None for all tokens, including padding.

    Returns:
      The batch. Its shares add up to 1, or to 0 if there are no targets. If
      `segments` and `is_target` are None, the shares are None.

    Raises:
      TypeError: tokens or segments are not integers, or `is_target` contains
        neither bools nor numbers.
      ValueError: shapes differ, rows have different lengths, or T is 0.
    """
    ids = _as_array("tokens", tokens)
    parts = _as_array("segments", segments)
    chosen = _as_array("is_target", is_target)
    _check(ids, segments=parts, is_target=chosen)
    if parts is None and chosen is None:
      return cls(ids)
    counted = jnp.ones(ids.shape, bool)
    if chosen is not None:
      counted &= chosen.astype(bool)
    counted = counted.at[:, 0].set(False)
    if parts is not None:
      counted &= jnp.pad(parts[:, 1:] == parts[:, :-1], ((0, 0), (1, 0)))
    shares = counted / jnp.maximum(jnp.sum(counted), 1)
    return cls(ids, parts, shares.astype(jnp.float32))

  @property
  def inputs(self) -> Array:
    """The tokens that the model reads, int32 [B, T]."""
    return self.tokens[:, :-1]

  @property
  def targets(self) -> Array:
    """The tokens to predict, int32 [B, T]."""
    return self.tokens[:, 1:]

  @property
  def input_segments(self) -> Array | None:
    """The segments of the inputs, int32 [B, T], or None."""
    return None if self.segments is None else self.segments[:, :-1]

  @property
  def target_shares(self) -> Array | None:
    """The shares of the targets, f32 [B, T], or None."""
    return None if self.shares is None else self.shares[:, 1:]


def _check(tokens: Any, **others: Any) -> None:
  """Raises an error unless the arrays form a batch."""
  rule, remedy = "int [B, T + 1] with T at least 1", "pass token ids"
  check_array("Batch", "tokens", tokens, rule, kind=jnp.integer, remedy=remedy)
  if tokens.ndim != 2 or tokens.shape[1] < 2:
    remedy = "pass at least two tokens per sequence: the first is not a target"
    if tokens.ndim != 2:
      remedy = "pass one row per sequence, as in tokens[None] for one sequence"
    raise ValueError(
      f"Batch: tokens must be {rule}, got {tokens.shape}; {remedy}"
    )
  for name, x in others.items():
    if x is not None:
      check_like("Batch", name, x, tokens.shape)


def _as_array(name: str, x: Any) -> Any:
  """Converts an argument to an array; None stays None."""
  if x is None:
    return None
  if not is_array(x):
    try:
      found = np.asarray(x)
    except ValueError as error:  # Rows differ in length.
      raise ValueError(
        f"Batch: {name} must be [B, T + 1], got rows of different lengths; pad "
        "them to the same length, and set is_target to False for the padding"
      ) from error
    if found.dtype.kind not in "biuf":
      return x  # `_check` refuses it.
    x = found
  return jnp.asarray(x)


def positions(segments: Array | None) -> Array | None:
  """Counts positions from 0 in each document; returns int32 [B, T] or None."""
  if segments is None:
    return None
  place = lax.broadcasted_iota(jnp.int32, segments.shape, 1)
  is_first = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
  return place - lax.cummax(jnp.where(is_first, place, 0), axis=1)
