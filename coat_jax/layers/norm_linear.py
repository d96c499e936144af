# SPDX-License-Identifier: Apache-2.0
"""Norm followed by a linear layer: the front of a block on its own."""

import dataclasses
from typing import Unpack

from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.layers.block_module import NormLinearOptions, Parts
from coat_jax.layers.front import (
  front_backward,
  front_forward,
  plain_front,
)
from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  check_float,
  check_recipe,
  reshard,
)
from coat_jax.layers.norm import norm_options
from coat_jax.layers.operands import gradient_operand
from coat_jax.layers.product import (
  LinearWeights,
  bias_gradient,
  weights_specs,
)
from coat_jax.layers.rule import rule
from coat_jax.mesh import own_columns, product_spec, tokens
from coat_jax.numerics.checks import check_kind
from coat_jax.numerics.recipes import CoatRecipe


def _fwd(x, weights, kind, eps, recipe):
  y, _, saved = front_forward(x, weights, kind, eps, recipe)
  return y, saved


def _bwd(kind, eps, recipe, inputs, saved, g):
  del kind, eps
  (weights,) = inputs
  g_q = gradient_operand(g, recipe)
  dx, dw = front_backward(weights, saved, g_q, recipe, like=g)
  dbias = bias_gradient(g, weights.bias, recipe, has_columns=True)
  return dx, dw._replace(bias=dbias)


def _specs(x, weights, kind, eps, recipe):
  del kind, eps
  axes = recipe.axes
  arrays = tokens(axes, x), weights_specs(axes, weights, "columns")
  return arrays, own_columns(axes, x.ndim)


_norm_linear = rule(
  _fwd,
  _bwd,
  _specs,
  reads=(1,),
  result_spec=lambda x, weights: product_spec(x, weights.w),
)


def norm_linear(
  x: Array,
  weights: LinearWeights,
  *,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
) -> Array:
  """norm(x) w + bias.

  Args:
    x: [..., D], BF16 (or f32).
    weights: see `LinearWeights`; w is [D, F].
    kind: "rms" or "layer"; None for no norm.
    eps: epsilon of the norm.
    recipe: fused if both `linear` and `nonlinear` are "fp8".

  Returns:
    [..., F] in x's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: x's last axis is not w's first; other shapes are inconsistent,
      the kind is unknown or `eps` is negative.
  """
  op = "norm_linear"
  check_recipe(op, recipe)
  check_float(op, "x", x)
  remedy = "pass one, as in LinearWeights(w, gamma=gamma)"
  check_kind(op, "weights", weights, LinearWeights, remedy)
  if kind is not None and recipe.nonlinear == "fp8":
    return _norm_linear((x, weights), kind, eps, recipe)
  return plain_front(x, weights, kind, eps, recipe)


class NormLinear(RecipeModule):
  """A norm fused with the linear layer that reads it.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import NormLinear
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> layer = NormLinear(64, 192, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 192)

  Attributes:
    norm: RMSNorm or LayerNorm (its parameters); None without a norm.
    linear: Linear (its parameters).
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    use_bias: bool = True,
    rngs: nnx.Rngs,
    **options: Unpack[NormLinearOptions],
  ):
    """Initializes the parameters.

    Args:
      in_features: D, width of the input.
      out_features: F, width of the output.
      use_bias: whether the product has a bias [F].
      rngs: its stream `params` initializes the parameters.
      **options: see `NormLinearOptions`.

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, or `norm` is unknown.
    """
    parts = Parts.of("NormLinear", options, rngs, NormLinearOptions)
    parts = dataclasses.replace(parts, use_bias=use_bias)
    super().__init__(
      parts.recipe,
      parts.dtype,
      parts.param_dtype,
      rngs,
      in_features=in_features,
      out_features=out_features,
    )
    self.norm = parts.make_norm(parts.norm, in_features)
    self.linear = parts.make_front(in_features, out_features)

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Normalizes and multiplies the last axis.

    Args:
      x: [..., in_features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., out_features] in `dtype`.
    """
    y = norm_linear(
      self.cast(x, self.linear.kernel),
      LinearWeights.of(self.linear, self.norm),
      **norm_options(self.norm),
      recipe=self.active_recipe,
    )
    return reshard(y, out_sharding)
