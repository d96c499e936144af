# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts block: norm, router, gated experts, residual add.

`layers.experts` documents the computation and what is saved in FP8.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.layers.activation import activate
from coat_jax.layers.block_module import NormLinearOptions, Parts
from coat_jax.layers.expert_products import (
  cache_experts,
  input_gradient,
  multiply_rows,
  weight_gradient,
)
from coat_jax.layers.experts import (
  MoEKind,
  MoEWeights,
  expert_specs,
  experts_rule,
  moe_specs,
  moe_types,
)
from coat_jax.layers.linear import default_kernel_init
from coat_jax.layers.module import (
  CacheableWeight,
  RecipeModule,
  Sharding,
  check_float,
  check_recipe,
  reshard,
)
from coat_jax.layers.norm import norm, norm_options, weights_of_norm
from coat_jax.layers.parameters import NO_METADATA, Metadata, make_param
from coat_jax.layers.residuals import residual_scope
from coat_jax.layers.routing import (
  RoutingStats,
  choose_experts,
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
  sum_tokens,
  token_shards,
)
from coat_jax.numerics.checks import Range, check_flags, check_kind, check_whole
from coat_jax.ops import Operand
from coat_jax.recipes import CoatRecipe

# The fan-in does not include E, so each expert is initialized like a `Linear`.
default_experts_init = nnx.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)


def moe(
  x: Array,
  weights: MoEWeights,
  *,
  experts_per_token: int,
  normalize: bool,
  kind: ops.NormKind | None,
  eps: float,
  add_input: bool = True,
  recipe: CoatRecipe,
) -> tuple[Array, RoutingStats]:
  """Runs a mixture of experts on norm(x), and adds x.

  Computes x + sum_e p_e (silu(norm(x) w_gate_e) * (norm(x) w_up_e)) w_down_e.
  For each token, the sum is over the k experts with the largest probabilities
  p = softmax(norm(x) w_router). No token is dropped.

  Args:
    x: [..., D], the residual stream, BF16 (or f32).
    weights: see `MoEWeights`.
    experts_per_token: k.
    normalize: whether the probabilities of a token's k experts are divided by
      their sum.
    kind, eps, add_input: see `layers.block`.
    recipe: if `recipe.nonlinear` is "fp8", residuals are saved in FP8. The
      experts' matmuls run in FP8 if `recipe.experts` is "fp8", else in x's
      dtype.

  Returns:
    [..., D] in x's dtype, and the statistics for `load_balancing_loss`.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes are inconsistent, k is below 1 or above E, the norm is
      unknown or `eps` is negative.
  """
  _check(x, weights, experts_per_token, recipe)
  check_flags("moe", normalize=normalize, add_input=add_input)
  static = MoEKind(kind, eps, experts_per_token, normalize, add_input)
  if recipe.nonlinear == "fp8":
    return experts_rule((x, weights), static, recipe)
  y = x
  if kind is not None:
    gamma, beta = weights.gamma, weights.beta
    y = norm(x, gamma, beta, kind=kind, eps=eps, recipe=recipe)
  weights = weights._replace(
    gamma=None, beta=None, gate_up_cache=None, down_cache=None
  )
  return _plain((x, y, weights), static, recipe)


def _plain_fwd(x, y, w, static, recipe):
  axes = recipe.axes
  mixture = functools.partial(_of_device, static=static, recipe=recipe)
  if expert_size(axes) > 1:
    # Don't save the large buffer of received rows.
    mixture = jax.checkpoint(mixture)
  differentiated: Any = jax.vjp(mixture, y, w, has_aux=True)
  (out, probability), backward, load = differentiated
  out = x + out if static.add_input else out
  stats = mean_over_devices(RoutingStats(load, probability), axes)
  # Don't save the weights: `rule` passes them to the backward pass.
  of_y, _ = backward.args_res
  return (out, stats), backward.replace(args_res=[of_y, None])


def _plain_bwd(static, recipe, inputs, backward, cotangents):
  axes, (w,), (g, dstats) = recipe.axes, inputs, cotangents
  of_y, _ = backward.args_res
  backward = backward.replace(args_res=[of_y, w])
  dy, dw = backward((g, dstats.probability / token_shards(axes)))
  dx = g if static.add_input else jnp.zeros_like(g)
  # Only the gradient of the router must still be summed over devices.
  return dx, dy, dw._replace(router=sum_tokens(dw.router, axes))


def _plain_specs(x, y, w, static, recipe):
  del y
  (each, of_weights), results = moe_specs(x, w, static, recipe)
  return (each, each, of_weights), results


_plain = rule(
  _plain_fwd, _plain_bwd, _plain_specs, reads=(2,), result_spec=moe_types
)


def _of_device(y, w, *, static, recipe):
  """Runs the mixture on a device's tokens."""
  axes, num_experts = recipe.axes, w.router.shape[-1]
  with residual_scope("linear"):
    experts = choose_experts(y, w.router, static.experts_per_token)
    p, probability = expert_weights(
      y, w.router, experts, normalize=static.normalize
    )
    load = load_of(experts, num_experts)
    # From here on, a device has whole sequences and its shard of dimension F.
    y, experts, p = gather_positions((y, experts, p), axes)
    rows = sort_rows(experts, num_experts, axes)
    p = p_of_rows(p, rows)
    h = _product(to_rows(y, rows), w.gate_up, rows, recipe)
  z = activate(*jnp.split(h, 2, axis=-1), activation="silu", recipe=recipe)
  with residual_scope("activation"):
    z = (p * z.astype(jnp.float32)).astype(y.dtype)
  with residual_scope("linear"):
    out = _product(z, w.down, rows, recipe)
    out = sum_of_copies(out, rows).astype(y.dtype)
  return (scatter_sequence(out, axes), probability), load


def _multiply(x, w, rows, recipe):
  return multiply_rows(x, w, rows, recipe, x.dtype)[0]


def _multiply_fwd(x, w, rows, recipe):
  return _multiply(x, w, rows, recipe), (x, w, rows)


def _multiply_bwd(recipe, saved, g):
  x, w, rows = saved
  dx = input_gradient(g, w, None, rows, recipe, g.dtype)
  return dx, weight_gradient(x, g, w, rows, recipe), None


_product = jax.custom_vjp(_multiply, nondiff_argnums=(3,))
_product.defvjp(_multiply_fwd, _multiply_bwd)


def _check(x, w, experts_per_token, recipe) -> None:
  """Raises for wrong types or shapes; with mesh axes, w may contain shards."""
  check_recipe("moe", recipe)
  check_float("moe", "x", x)
  remedy = "pass one, as in MoEWeights(gamma, None, router, gate_up, down)"
  check_kind("moe", "weights", w, MoEWeights, remedy)
  router, gate_up, down = w.router.shape, w.gate_up.shape, w.down.shape
  fits = (len(router), len(gate_up), len(down)) == (2, 4, 3)
  fits = fits and gate_up[2] == 2 and gate_up[0] == down[0] == router[1]
  if fits and not recipe.axes:
    fits = gate_up[1] == down[2] == router[0] == x.shape[-1]
    fits = fits and gate_up[3] == down[1]
  if not fits:
    raise ValueError(
      "moe: weights must be router [D, E], gate_up [E, D, 2, F] and down "
      f"[E, F, D] for x [..., D], got {router}, {gate_up} and {down} "
      f"for {x.shape}; pass one MoE's weights, and an x whose last axis is D"
    )
  _check_experts("moe", experts_per_token, router[1])


def _check_experts(op: str, experts_per_token: Any, num_experts: int) -> None:
  name, remedy = "experts_per_token", "pass at most the number of experts"
  check_whole(op, name, experts_per_token, Range(1, num_experts), remedy)


class MoE(RecipeModule):
  """The MLP half of a decoder layer as a mixture of experts; see `layers.moe`.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import MoE, load_balancing_loss
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> experts = MoE(64, 96, 8, 2, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> y, stats = experts(jnp.ones((2, 16, 64), jnp.bfloat16))
    >>> y.shape, stats.load.shape
    ((2, 16, 64), (8,))
    >>> load_balancing_loss(stats).shape
    ()

  Attributes:
    num_experts, experts_per_token, normalize, add_input: the constructor's
      arguments.
    norm: RMSNorm or LayerNorm; None without a norm.
    router: [features, num_experts].
    gate_up: [num_experts, features, 2, hidden_features], gate first.
    down: [num_experts, hidden_features, features].
    gate_up_cache, down_cache: caches of these weights; None except in a copy
      from `with_weight_cache`.
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    num_experts: int,
    experts_per_token: int,
    *,
    normalize: bool = False,
    add_input: bool = True,
    router_init: nnx.Initializer = default_kernel_init,
    router_metadata: Metadata = NO_METADATA,
    out_kernel_init: nnx.Initializer | None = None,
    out_kernel_metadata: Metadata = NO_METADATA,
    rngs: nnx.Rngs,
    **options: Unpack[NormLinearOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width of an expert's gate and up.
      num_experts: E, number of experts.
      experts_per_token: k, number of experts that each token goes to.
      normalize: whether the probabilities of a token's k experts are divided by
        their sum (`norm_topk_prob` in Hugging Face Transformers).
      add_input: whether the block adds its input, the residual stream.
      router_init, router_metadata: initializer and metadata of the router.
      out_kernel_init, out_kernel_metadata: initializer and metadata of down;
        the initializer is called with [E, F, D]; None for `kernel_init`.
      rngs: its `params` stream provides the keys for initializers.
      **options: see `NormLinearOptions`. Matmuls have no bias. The experts'
        matmuls run in `dtype`, or in FP8 if `recipe.experts` is "fp8".
        `kernel_init` is called with [E, D, 2 F]. `out_sharding` in
        `kernel_metadata` refers to the four axes of gate_up.

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, k is above E, or the norm is
        unknown.
    """
    known = NormLinearOptions.__annotations__.keys()
    known -= {"bias_init", "bias_metadata"}
    parts = Parts.of("MoE", options, rngs, known)
    super().__init__(
      **parts.shared,
      features=features,
      hidden_features=hidden_features,
      num_experts=num_experts,
      experts_per_token=experts_per_token,
    )
    _check_experts("MoE", experts_per_token, num_experts)
    check_flags("MoE", normalize=normalize, add_input=add_input)
    self.num_experts, self.experts_per_token = num_experts, experts_per_token
    self.normalize, self.add_input = normalize, add_input
    self.norm = parts.make_norm(parts.norm, features)

    def make(init, shape, metadata, **drawn: Any) -> nnx.Param:
      return make_param(init, rngs, shape, parts.param_dtype, metadata, **drawn)

    e, d, f = num_experts, features, hidden_features
    kernel_init = parts.kernel_init or default_experts_init
    self.router = make(router_init, (d, e), router_metadata)
    self.gate_up = make(
      kernel_init, (e, d, 2, f), parts.kernel_metadata, drawn=(e, d, 2 * f)
    )
    self.down = make(
      out_kernel_init or kernel_init, (e, f, d), out_kernel_metadata
    )
    self.gate_up_cache: Operand | None = nnx.data(None)
    self.down_cache: Operand | None = nnx.data(None)

  def cacheable_weights(self) -> dict[str, CacheableWeight]:
    """Returns gate_up and down, keyed by the names of their caches."""
    axes = self.active_recipe.axes
    gate_up, down = (None, None) if axes is None else expert_specs(axes)
    of = functools.partial(CacheableWeight, compute=cache_experts)
    return {
      "gate_up_cache": of(self.gate_up[...], 4, spec=gate_up),
      "down_cache": of(self.down[...], 3, spec=down),
    }

  def __call__(
    self, x: Array, out_sharding: Sharding = None
  ) -> tuple[Array, RoutingStats]:
    """Runs the block.

    Args:
      x: [..., features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., features] in `dtype`, and the statistics of these tokens for
      `load_balancing_loss`.
    """
    gamma, beta = weights_of_norm(self.norm)
    arrays = self.router[...], self.gate_up[...], self.down[...]
    y, stats = moe(
      self.cast(x, self.gate_up),
      MoEWeights(gamma, beta, *arrays, self.gate_up_cache, self.down_cache),
      experts_per_token=self.experts_per_token,
      normalize=self.normalize,
      **norm_options(self.norm),
      add_input=self.add_input,
      recipe=self.active_recipe,
    )
    return reshard(y, out_sharding), stats
