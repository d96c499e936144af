# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and the order in which experts have tokens.

A router's logits are one product, and its probabilities the softmax over all
experts, both in f32. Each token goes to the k experts with the largest; none is
dropped: the T k copies of tokens are sorted by expert into [T k, D], groups of
unequal sizes, whose shapes do not depend on the routing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.checks import check_kind


class RoutingStats(NamedTuple):
  """What the auxiliary loss reads of a layer's routing; f32 [..., E].

  Attributes:
    load: copies of tokens an expert got, as a fraction of the tokens; the sum
      over experts is k. It has no gradient.
    probability: the mean over tokens of the router's probability.
  """

  load: Array
  probability: Array


class Rows(NamedTuple):
  """Copies of tokens sorted by expert, and the way back; int32.

  Attributes:
    copy: [T k], which copy a row is: that of token `copy // k`.
    row: [T k], the row of each copy: the inverse of `copy`.
    sizes: [E], how many rows each expert has.
  """

  copy: Array
  row: Array
  sizes: Array


def load_balancing_loss(stats: RoutingStats) -> Array:
  """The auxiliary loss that keeps experts equally busy: E sum_e f_e P_e.

  k where all experts are, E at most. As in transformers
  (`load_balancing_loss_func`) the fractions f and the probabilities P are those
  of all layers' tokens together. It is to be added to the loss times the
  configuration's coefficient.

  Args:
    stats: from `MoE`; with any axes in front, as of layers that were scanned.

  Returns:
    f32 scalar.

  Raises:
    TypeError: `stats` are no RoutingStats.
    ValueError: their shapes differ.

  Source: arXiv:2101.03961, section 2.2, for k experts a token.
  """
  op, remedy = "load_balancing_loss", "pass what MoE returned"
  check_kind(op, "stats", stats, RoutingStats, remedy)
  if stats.load.shape != stats.probability.shape:
    raise ValueError(
      f"{op}: load and probability must have one shape, got "
      f"{stats.load.shape} and {stats.probability.shape}; {remedy}"
    )
  num_experts = stats.load.shape[-1]
  layers = tuple(range(stats.load.ndim - 1))
  load = jnp.mean(lax.stop_gradient(stats.load), axis=layers)
  return num_experts * jnp.sum(load * jnp.mean(stats.probability, axis=layers))


def choose_experts(y: Array, w: Array, experts_per_token: int) -> Array:
  """int32 [..., k], the most probable first; of two alike the first.

  Args:
    y: [..., D], what the router reads.
    w: [D, E].
    experts_per_token: k.
  """
  return lax.top_k(_logits(y, w), experts_per_token)[1]


def expert_weights(
  y: Array, w: Array, experts: Array, *, normalize: bool
) -> tuple[Array, Array]:
  """What chosen experts' outputs are multiplied by; differentiable in y and w.

  Args:
    y: [..., D], what the router reads.
    w: [D, E].
    experts: int [..., k], from `choose_experts`.
    normalize: whether the weights of a token are divided by their sum.

  Returns:
    f32 [..., k], and the mean probability of every expert, f32 [E].
  """
  probabilities = jax.nn.softmax(_logits(y, w), axis=-1)
  chosen = jnp.take_along_axis(probabilities, experts, axis=-1)
  if normalize:
    chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
  tokens = tuple(range(probabilities.ndim - 1))
  total = jnp.sum(probabilities, axis=tokens)
  return chosen, total / _num_tokens(experts)


def _logits(y: Array, w: Array) -> Array:
  # In full f32: the 10 bits of a GPU's default would send tokens elsewhere. It
  # has E / (3 k F) of the experts' operations, below a hundredth.
  y, w = y.astype(jnp.float32), w.astype(jnp.float32)
  return jnp.matmul(y, w, precision="highest")


def sort_rows(experts: Array, num_experts: int) -> Rows:
  """Sorts the copies of all tokens by their expert, and then by token.

  Args:
    experts: int [..., k].
    num_experts: E.
  """
  experts = experts.reshape(-1)
  copy = jnp.argsort(experts, stable=True)
  places = jnp.arange(experts.size, dtype=copy.dtype)
  row = jnp.zeros_like(copy).at[copy].set(places, unique_indices=True)
  sizes = jnp.bincount(experts, length=num_experts)
  return Rows(copy, row, sizes.astype(jnp.int32))


def to_rows(x: Array, rows: Rows, experts_per_token: int) -> Array:
  """[..., n] of tokens to [T k, n], a row for each copy.

  Args:
    x: of tokens.
    rows: from `sort_rows`.
    experts_per_token: k.
  """
  x = x.reshape(-1, x.shape[-1])
  return _take(x, rows.copy // experts_per_token)


def p_of_rows(p: Array, rows: Rows) -> Array:
  """Weights [..., k] of copies to those of rows, [T k, 1]."""
  return _take(p.reshape(-1, 1), rows.copy)


def copies_of(x: Array, rows: Rows) -> Array:
  """[T k, ...] of rows to the same of copies, k of a token after another."""
  return _take(x, rows.row)


def sum_of_copies(x: Array, rows: Rows, shape: tuple[int, ...]) -> Array:
  """[T k, n] of rows to f32 [..., n], the sum over a token's copies.

  Args:
    x: of rows.
    rows: from `sort_rows`.
    shape: [..., k], of the experts that `rows` were sorted by.
  """
  x = copies_of(x, rows).reshape(*shape, x.shape[-1])
  return jnp.sum(x.astype(jnp.float32), axis=-2)


def load_of(experts: Array, num_experts: int) -> Array:
  """f32 [E]: how many of the tokens each expert has, as a fraction of them.

  Args:
    experts: int [..., k].
    num_experts: E.
  """
  counts = jnp.bincount(experts.reshape(-1), length=num_experts)
  return counts.astype(jnp.float32) / _num_tokens(experts)


def _num_tokens(experts: Array) -> int:
  """How many tokens have experts [..., k]; 1 for none, whose sums are 0."""
  return max(experts.size // experts.shape[-1], 1)


def _take(x: Array, index: Array) -> Array:
  return x.at[index].get(mode="promise_in_bounds")
