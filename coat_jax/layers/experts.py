# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with one custom_vjp and FP8 residuals.

  router   x --norm--> y --matmul, softmax in f32--> experts and weights p
  front    y --copied, sorted by expert, matmul--> gate, up    [T k, 2 F]
  middle   z = p silu(gate) up
  back     z --matmul, summed over a token's copies--> + x (`add_input`)

The front and the back run grouped matmuls in x's dtype (BF16) or, with
recipe.experts="fp8", in FP8. The forward pass saves these activations:

  x                  [T, D]       FP8, in 1 x G groups
  gate, up           [T k, 2 F]   FP8, in 1 x G groups
  chosen experts     [T k]        int32

The backward pass recomputes the rest. recipe.residuals has no effect.

The weights p multiply silu(gate) up [T k, F] instead of the experts' outputs
[T k, D]. The backward pass computes dz = dout w_down^T anyway, and from dz the
gradient dp = dz . (silu(gate) up). So the experts' outputs are neither saved
nor recomputed.

On a mesh, the rows of weights are split over the fsdp axis, and gathered in
BF16 or FP8 before use. The dimension F is split over the tensor axis: a device
computes its shard of F for all positions of its sequences, and the outputs'
partial sums are reduce-scattered over positions.

With a mesh axis `expert` of n devices, each device holds E / n experts. Devices
exchange rows (`layers.exchange`) in these formats, without extra rounding:

  tokens, in both passes          FP8 codes of x, which the receiver dequantizes
                                  and normalizes; with FP8 experts, codes of y
  gradients of outputs            BF16; with FP8 experts, E5M2 codes
  outputs, gradients of tokens    BF16; a token's k rows are summed in f32

The received rows are large and therefore not saved. The backward pass exchanges
the tokens again, which the gradients of the weights need anyway, and recomputes
gate and up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P

from coat_jax import ops
from coat_jax.layers.expert_products import (
  Scales,
  copies_in_rows,
  input_gradient,
  multiply_rows,
  scale_of,
  weight_gradient,
)
from coat_jax.layers.norm import NormSaved, norm_gradients
from coat_jax.layers.operands import (
  cache_specs,
  gradient_scaling,
  groups_of,
  in_groups,
  value_scaling,
)
from coat_jax.layers.product import add_in_f32
from coat_jax.layers.residuals import cotangent, save_residual
from coat_jax.layers.routing import (
  RoutingStats,
  choose_experts,
  copies_of,
  expert_weights,
  load_of,
  mean_over_devices,
  p_of_rows,
  sort_rows,
  sum_of_copies,
  to_rows,
)
from coat_jax.layers.rule import rule
from coat_jax.mesh import (
  expert_size,
  gather_positions,
  scatter_sequence,
  spec_of,
  split_inputs,
  sum_tokens,
  token_shards,
  tokens,
)
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.varying import varying
from coat_jax.ops import Operand
from coat_jax.recipes import MeshAxes


class MoEWeights(NamedTuple):
  """Parameters of a mixture of experts, or their gradients.

  Attributes:
    gamma, beta: the norm's scale and bias, [D] or None.
    router: [D, E].
    gate_up: [E, D, 2, F], gate first.
    down: [E, F, D].
    gate_up_cache, down_cache: scales, and possibly codes, of these weights,
      from `with_weight_cache`; None without a cache.
  """

  gamma: Array | None
  beta: Array | None
  router: Array
  gate_up: Array
  down: Array
  gate_up_cache: Operand | None = None
  down_cache: Operand | None = None


class MoEKind(NamedTuple):
  """The static arguments of `layers.moe`, without the recipe."""

  kind: ops.NormKind | None
  eps: float
  experts_per_token: int
  normalize: bool
  add_input: bool


class _Saved(NamedTuple):
  x: QTensor
  experts: Array  # int32 [..., k], for the device's positions.
  # Gate and up of whole sequences. Their rows are sorted by expert and reshaped
  # to [..., k, F]. None if devices exchanged rows.
  parts: tuple[QTensor, ...] | None
  scales: Scales


def _fwd(x, weights, static, recipe):
  w, axes, dtype = weights, recipe.axes, x.dtype
  num_experts = w.router.shape[-1]
  x_q = save_residual("norm", in_groups(x, recipe))
  y, _ = _normed(x_q, w, static, dtype)
  experts = choose_experts(y, w.router, static.experts_per_token)
  experts = save_residual("linear", experts)
  p, probability = expert_weights(
    y, w.router, experts, normalize=static.normalize
  )
  stats = RoutingStats(load_of(experts, num_experts), probability)

  rows = sort_rows(gather_positions(experts, axes), num_experts, axes)
  p = p_of_rows(gather_positions(p, axes), rows)
  y_rows = _input_rows(x_q, rows, w, static, recipe, dtype)
  h, gate_up_scale = multiply_rows(
    y_rows, w.gate_up, rows, recipe, dtype, w.gate_up_cache
  )
  of_z = p if recipe.experts == "fp8" else None
  parts, z_scale = _gate_and_up(h, rows, recipe, of_z)
  saved = None
  if rows.exchange is None:
    parts = saved = save_residual("activation", parts)
  z = _activated(_flat(parts), p, z_scale, recipe, dtype)
  out, down_scale = multiply_rows(z, w.down, rows, recipe, dtype, w.down_cache)
  out = sum_of_copies(out, rows).astype(dtype)
  out = scatter_sequence(out, axes)
  if static.add_input:
    out = add_in_f32(x, out)
  scales = Scales(scale_of(y_rows), gate_up_scale, scale_of(z), down_scale)
  scales = save_residual("linear", scales)
  stats = mean_over_devices(stats, axes)
  return (out, stats), _Saved(x_q, experts, saved, scales)


def _bwd(static, recipe, inputs, saved, cotangents):
  (w,), (g, dstats) = inputs, cotangents
  axes, dtype = recipe.axes, g.dtype
  if expert_size(axes) > 1:
    # If layers are not scanned, this barrier prevents XLA from keeping the
    # buffers of rows that the forward pass received.
    saved, g = jax.lax.optimization_barrier((saved, g))
  x_q, experts, parts, scales = saved
  own_y, norm_stats = _normed(x_q, w, static, dtype)

  def route(y, router):
    return expert_weights(y, router, experts, normalize=static.normalize)

  # Without `varying`, JAX would sum the router's gradient over devices, and
  # `sum_tokens` below would sum it again.
  (p, _), route_backward = jax.vjp(route, *varying((own_y, w.router)))
  experts = gather_positions(experts, axes)
  rows = sort_rows(experts, w.router.shape[-1], axes)
  p = p_of_rows(gather_positions(p, axes), rows)
  gate_up_cache = w.gate_up_cache or scales.gate_up
  y_rows = None
  if parts is None:
    y_rows = _input_rows(x_q, rows, w, static, recipe, dtype, scales.y)
    h, _ = multiply_rows(y_rows, w.gate_up, rows, recipe, dtype, gate_up_cache)
    parts, _ = _gate_and_up(h, rows, recipe)
  parts = _flat(parts)

  dout = copies_in_rows(
    gather_positions(g, axes), rows, gradient_scaling(recipe), recipe
  )
  down_cache = w.down_cache or scales.down
  dz = input_gradient(dout, w.down, down_cache, rows, recipe, dtype)
  dh, z, dp = _activated_gradient(dz, parts, p, scales.z, recipe)
  dp = scatter_sequence(copies_of(dp, rows)[..., 0], axes)
  ddown = weight_gradient(z, dout, w.down, rows, recipe)
  if y_rows is None:
    y_rows = _input_rows(x_q, rows, w, static, recipe, dtype, scales.y)
  dgate_up = weight_gradient(y_rows, dh, w.gate_up, rows, recipe)
  dy = input_gradient(dh, w.gate_up, gate_up_cache, rows, recipe, dtype)
  dy = scatter_sequence(sum_of_copies(dy, rows).astype(dtype), axes)

  dprobability = dstats.probability / token_shards(axes)
  from_router, drouter = route_backward(varying((dp, dprobability)))
  drouter = cotangent(sum_tokens(drouter, axes), w.router)
  dx, dgamma, dbeta = add_in_f32(dy, from_router), None, None
  if norm_stats is None:
    dx = add_in_f32(dx, g) if static.add_input else dx
  else:
    dx, dgamma, dbeta = norm_gradients(
      NormSaved(x_q, norm_stats),
      w.gamma,
      w.beta,
      dx,
      g if static.add_input else None,
      recipe,
    )
  return dx, MoEWeights(dgamma, dbeta, drouter, dgate_up, ddown)


def moe_specs(x, weights, static, recipe):
  """Returns the specs of a mixture's arguments and results, for `rule`."""
  del static
  gate_up, down = expert_specs(recipe.axes)
  of_weights: Any = MoEWeights(
    P(),  # pyright: ignore[reportArgumentType]
    P(),  # pyright: ignore[reportArgumentType]
    P(),  # pyright: ignore[reportArgumentType]
    gate_up,  # pyright: ignore[reportArgumentType]
    down,  # pyright: ignore[reportArgumentType]
    cache_specs(weights.gate_up_cache, gate_up),
    cache_specs(weights.down_cache, down),
  )
  each = tokens(recipe.axes, x)
  return (each, of_weights), (each, P())


def expert_specs(axes: MeshAxes) -> tuple[P, P]:
  """Returns the specs of gate_up and down."""
  gate_up = P(axes.expert, axes.fsdp, None, axes.tensor)
  return gate_up, P(axes.expert, *split_inputs(axes))


def moe_types(x, *others):
  """Returns the specs of results on explicit mesh axes, for `rule`."""
  del others
  return spec_of(x), P()


experts_rule = rule(_fwd, _bwd, moe_specs, reads=(1,), result_spec=moe_types)


def _normed(x_q, w, static, dtype):
  """Dequantizes and normalizes x; also returns norm statistics, or None."""
  values = x_q.dequantize()
  if static.kind is None:
    return values.astype(dtype), None
  y, stats = ops.norm_values(
    values, w.gamma, w.beta, kind=static.kind, eps=static.eps
  )
  return y.astype(dtype), stats


def _input_rows(x_q, rows, w, static, recipe, dtype, scale=None):
  """Normalizes x and copies it to the rows that the first matmul reads."""
  x_q = gather_positions(x_q, recipe.axes)
  if rows.exchange is not None and recipe.experts == "bf16":
    # Exchange codes of x, which are smaller than y in BF16.
    x_q = jax.tree.map(lambda a: to_rows(a, rows), x_q)
    return _normed(x_q, w, static, dtype)[0]
  y, _ = _normed(x_q, w, static, dtype)
  return copies_in_rows(y, rows, value_scaling(recipe), recipe, scale)


def _gate_and_up(h, rows, recipe, p=None) -> tuple[tuple[QTensor, ...], Any]:
  """Returns quantized gate and up, each [..., k, F], and the scale of z."""
  first, *others = rows.shape
  # After an exchange there are n T k rows instead of T k.
  shape = first * expert_size(recipe.axes), *others
  return ops.activation_input(
    h.reshape(*shape, h.shape[-1]),
    activation="silu",
    gated=True,
    groups=groups_of(recipe),
    output=value_scaling(recipe),
    factor=None if p is None else p.reshape(*shape, 1),
    implementation=recipe.implementation,
  )


def _activated(parts, p, scale, recipe, dtype) -> Array | Operand:
  """Computes z in row layout."""
  if recipe.experts == "bf16":
    return (p * ops.activated(parts, activation="silu")).astype(dtype)
  return ops.activation_fwd(
    parts,
    activation="silu",
    output=value_scaling(recipe),
    scale=scale,
    factor=p,
    implementation=recipe.implementation,
  )


def _activated_gradient(dz, parts, p, scale, recipe) -> tuple[Any, Any, Array]:
  """Computes the gradient of gate and up, z in column layout, and dp."""
  if recipe.experts == "bf16":
    product = ops.activated(parts, activation="silu")
    dp = jnp.sum(dz.astype(jnp.float32) * product, axis=-1, keepdims=True)
    dh = ops.activation_bwd(p * dz, parts, activation="silu")
    dh = jnp.concatenate(dh, axis=-1)
    return dh.astype(dz.dtype), (p * product).astype(dz.dtype), dp
  dh, z, _, dp = ops.activation_bwd_operands(
    dz,
    parts,
    activation="silu",
    gradient=gradient_scaling(recipe),
    output=value_scaling(recipe),
    scale=scale,
    factor=p,
    implementation=recipe.implementation,
  )
  return dh, z, dp  # pyright: ignore[reportReturnType]


def _flat(parts: tuple[QTensor, ...]) -> tuple[QTensor, ...]:
  return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), parts)
