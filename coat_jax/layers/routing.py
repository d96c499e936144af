# SPDX-License-Identifier: Apache-2.0
"""Chooses the experts of each token, and sorts tokens by expert.

Each token goes to its k most probable experts. No token is dropped: T tokens
have T k copies, which are sorted by expert into rows [T k, D]. Experts can have
different numbers of rows, but no array shape depends on the routing. If experts
are split over devices, devices then exchange rows (`layers.exchange`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax import ops
from coat_jax.layers.exchange import (
  Exchange,
  plan_exchange,
  send_back,
  send_rows,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.mesh import size_of, sum_tokens, token_shards
from coat_jax.numerics.checks import check_kind
from coat_jax.recipes import MeshAxes


class RoutingStats(NamedTuple):
  """A layer's routing statistics for the auxiliary loss; f32 [..., E].

  Attributes:
    load: for each expert, the fraction of all tokens that went to it; the sum
      over experts is k. No gradient flows through `load`.
    probability: the router's probabilities, averaged over tokens.
  """

  load: Array
  probability: Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["copy", "row", "sizes", "exchange"],
  meta_fields=["shape"],
)
@dataclasses.dataclass(frozen=True)
class Rows:
  """Maps k copies of each token to rows sorted by expert; arrays are int32.

  Attributes:
    shape: [..., k], the shape of the array of chosen experts.
    copy: [T k], the copy in each row; copy i contains token `i // k`.
    row: [T k], the inverse of `copy`: the row that contains each copy.
    sizes: the number of rows of each expert on this device: [E], or [E / n]
      if n devices exchange rows.
    exchange: the plan by which rows reach their experts; None if the device
      holds all experts. After an exchange, a device has R = n T k rows.
  """

  shape: tuple[int, ...]
  # Any instead of Array, because JAX also puts other objects here.
  copy: Any
  row: Any
  sizes: Any
  exchange: Exchange | None = None


def load_balancing_loss(stats: RoutingStats) -> Array:
  """Computes the auxiliary loss that balances experts: E sum_e f_e P_e.

  The result is k if all experts are used equally, and at most E. As in Hugging
  Face Transformers (`load_balancing_loss_func`), f (the load) and P (the
  probability) are averaged over the tokens of all layers. Multiply the result
  by the coefficient in the model's configuration, and add it to the loss.

  Args:
    stats: from `MoE`; may have leading axes, such as an axis of scanned layers.

  Returns:
    f32 scalar.

  Raises:
    TypeError: `stats` is not a RoutingStats.
    ValueError: the shapes of its fields differ.

  Source: arXiv:2101.03961, section 2.2, extended to k experts per token.
  """
  op, remedy = "load_balancing_loss", "pass the statistics from MoE"
  check_kind(op, "stats", stats, RoutingStats, remedy)
  if stats.load.shape != stats.probability.shape:
    raise ValueError(
      f"{op}: load and probability must have the same shape, got "
      f"{stats.load.shape} and {stats.probability.shape}; {remedy}"
    )
  num_experts = stats.load.shape[-1]
  layers = tuple(range(stats.load.ndim - 1))
  load = jnp.mean(lax.stop_gradient(stats.load), axis=layers)
  return num_experts * jnp.sum(load * jnp.mean(stats.probability, axis=layers))


def choose_experts(y: Array, w: Array, experts_per_token: int) -> Array:
  """Returns the k most probable experts of each token in y, int32 [..., k]."""
  logits = _logits(*lax.stop_gradient((y, w)))
  return lax.top_k(logits, experts_per_token)[1]


def expert_weights(
  y: Array, w: Array, experts: Array, *, normalize: bool
) -> tuple[Array, Array]:
  """Computes the weights p, f32 [..., k], of the chosen experts [..., k].

  Also returns the mean probability of every expert, f32 [E].
  """
  probabilities = jax.nn.softmax(_logits(y, w), axis=-1)
  chosen = jnp.take_along_axis(probabilities, experts, axis=-1)
  if normalize:
    chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
  tokens = tuple(range(probabilities.ndim - 1))
  total = jnp.sum(probabilities, axis=tokens)
  return chosen, total / _num_tokens(experts)


def _compute_logits(y: Array, w: Array) -> Array:
  """Computes y w in full f32.

  A GPU's default precision (TF32, a 10-bit mantissa) would change the routing.
  """
  if y.dtype != jnp.bfloat16:
    y, w = y.astype(jnp.float32), w.astype(jnp.float32)
    return jnp.matmul(y, w, precision="highest")
  # An f32 array is the exact sum of three BF16 arrays, and products of BF16
  # values are exact in f32. So BF16 tensor cores can compute this. On an H200,
  # the largest error is 3e-6 of the largest logit (1e-6 for an f32 matmul).
  parts = [w] if w.dtype == jnp.bfloat16 else _in_bf16(w.astype(jnp.float32))
  return sum(  # pyright: ignore[reportReturnType]
    jnp.matmul(y, part, preferred_element_type=jnp.float32)
    for part in reversed(parts)
  )


def _in_bf16(x: Array) -> list[Array]:
  """Splits f32 values into three BF16 arrays that add up to them."""
  parts = []
  for _ in range(3):
    # XLA may remove a cast to BF16 and back, but not this operation.
    part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    x = x - part
    parts.append(part.astype(jnp.bfloat16))
  return parts


def _logits_fwd(y, w):
  y = save_residual("linear", y)
  # Calling `_logits` here would prevent forward-mode derivatives of gradients.
  return _compute_logits(y, w), (y, w)


def _logits_bwd(saved, g):
  """Computes dy and dw with matmuls at the device's default precision."""
  y, w = saved
  _, backward = jax.vjp(jnp.matmul, y.astype(jnp.float32), w.astype(g.dtype))
  dy, dw = backward(g)
  return dy.astype(y.dtype), dw.astype(w.dtype)


_logits = jax.custom_vjp(_compute_logits)
_logits.defvjp(_logits_fwd, _logits_bwd)


def sort_rows(experts: Array, num_experts: int, axes: MeshAxes | None) -> Rows:
  """Sorts tokens' copies by expert, then by token; `experts` is [..., k]."""
  shape, experts = experts.shape, experts.reshape(-1)
  copy = jnp.argsort(experts, stable=True)
  places = jnp.arange(experts.size, dtype=copy.dtype)
  row = jnp.zeros_like(copy).at[copy].set(places, unique_indices=True)
  sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
  axis = None if axes is None else axes.expert
  if axis is None or size_of(axis) == 1:
    return Rows(shape, copy, row, sizes)
  exchange, sizes = plan_exchange(sizes, experts.size, axis)
  return Rows(shape, copy, row, sizes, exchange)


def to_rows(x: Array, rows: Rows, implementation: str | None = "xla") -> Array:
  """Copies tokens [..., c] to rows [T k, c]; with an exchange, to [R, c].

  Only implementation="xla", the default here, is differentiable.
  """
  index = rows.copy // rows.shape[-1]
  x = x.reshape(-1, x.shape[-1])
  return _sent(ops.take_rows(x, index, implementation=implementation), rows)


def p_of_rows(p: Array, rows: Rows) -> Array:
  """Moves weights p [..., k] to rows [T k, 1]; with an exchange, to [R, 1].

  Rows that the exchange leaves unused have the weight 0.
  """
  return _sent(_take(p.reshape(-1, 1), rows.copy), rows)


def copies_of(x: Array, rows: Rows) -> Array:
  """Inverts the exchange, if any, and the sorting; returns [..., k, c].

  x is [T k, c] (with an exchange, [R, c]), in the order of `to_rows`.
  """
  if rows.exchange is not None:
    x = send_back(x, rows.exchange)
  return _take(x, rows.row).reshape(*rows.shape, x.shape[-1])


def sum_of_copies(x: Array, rows: Rows) -> Array:
  """Sums each token's k rows of x in f32; returns [..., c]."""
  return jnp.sum(copies_of(x, rows).astype(jnp.float32), axis=-2)


def load_of(experts: Array, num_experts: int) -> Array:
  """Computes the fraction of the tokens that go to each expert, f32 [E]."""
  counts = jnp.bincount(experts.reshape(-1), length=num_experts)
  return counts.astype(jnp.float32) / _num_tokens(experts)


def mean_over_devices(
  stats: RoutingStats, axes: MeshAxes | None
) -> RoutingStats:
  """Averages statistics that devices computed from their own tokens."""
  shards = token_shards(axes)
  return jax.tree.map(lambda x: sum_tokens(x, axes) / shards, stats)


def _num_tokens(experts: Array) -> int:
  """Counts tokens; returns at least 1, so that callers can divide by it."""
  return max(experts.size // experts.shape[-1], 1)


def _sent(x: Array, rows: Rows) -> Array:
  return x if rows.exchange is None else send_rows(x, rows.exchange)


def _take(x: Array, index: Array) -> Array:
  return ops.take_rows(x, index, implementation="xla")
