# SPDX-License-Identifier: Apache-2.0
"""Norm followed by a linear layer: only the front of a block.

The norm reads 1 x G FP8 values and writes the E4M3 operand of the product,
without a BF16 array in between.
"""

from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.front import (
  FrontWeights,
  front_backward,
  front_forward,
  front_specs,
)
from coat_jax.layers.linear import (
  Linear,
  bias_gradient,
  linear,
)
from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  check_float,
  check_recipe,
  recipe_of,
  reshard,
)
from coat_jax.layers.norm import make_norm, norm, norm_options
from coat_jax.layers.operands import gradient_operand
from coat_jax.layers.parameters import NormLinearOptions, options_by_part
from coat_jax.layers.rule import rule
from coat_jax.mesh import own_columns, product_spec, tokens
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import Operand


def _norm_linear_fwd(x, weights, kind, eps, recipe):
  y, _, saved = front_forward(x, weights, kind, eps, recipe)
  return y, saved


def _norm_linear_bwd(kind, eps, recipe, inputs, saved, g):
  del kind, eps
  (weights,) = inputs
  g_q = gradient_operand(g, recipe)
  dx, dw = front_backward(weights, saved, g_q, recipe, like=g)
  dbias = bias_gradient(g, weights.bias, recipe, has_columns=True)
  return dx, dw._replace(bias=dbias)


def _specs(x, weights, kind, eps, recipe):
  del kind, eps
  axes = recipe.axes
  arrays = tokens(axes, x), front_specs(axes, weights)
  return arrays, own_columns(axes, x.ndim)


_norm_linear = rule(
  _norm_linear_fwd,
  _norm_linear_bwd,
  _specs,
  reads=(1,),
  result_spec=lambda x, weights: product_spec(x, weights.w),
)


def norm_linear(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  w: Array,
  bias: Array | None = None,
  *,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
  cache: Operand | None = None,
) -> Array:
  """norm(x) w + bias.

  Args:
    x: [..., D], BF16 (or f32).
    gamma, beta: [D] or None, of the norm.
    w: [D, F].
    bias: [F] or None.
    kind: "rms" or "layer"; None for no norm.
    eps: epsilon of the norm.
    recipe: fused if both `linear` and `nonlinear` are "fp8".
    cache: cache of w, from `layers.cache_weight`, or None.

  Returns:
    [..., F] in x's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: x's last axis is not w's first; other shapes are inconsistent,
      the kind is unknown or `eps` is negative.
  """
  check_recipe("norm_linear", recipe)
  check_float("norm_linear", "x", x)
  if kind is None:
    return linear(x, w, bias, recipe=recipe, cache=cache, split="columns")
  if recipe.nonlinear == "fp8":
    weights = FrontWeights(gamma, beta, w, bias, cache)
    return _norm_linear((x, weights), kind, eps, recipe)
  y = norm(x, gamma, beta, kind=kind, eps=eps, recipe=recipe)
  return linear(y, w, bias, recipe=recipe, cache=cache, split="columns")


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
    norm: RMSNorm or LayerNorm (its parameters).
    linear: Linear (its parameters).
  """

  counterparts = (nnx.Linear,)

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind | None = "rms",
    epsilon: float = 1e-6,
    use_scale: bool = True,
    scale_plus_one: bool = False,
    use_norm_bias: bool = False,
    use_bias: bool = True,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
    **options: Unpack[NormLinearOptions],
  ):
    """Initializes the parameters.

    Args:
      in_features: D, width of the input.
      out_features: F, width of the output.
      recipe: what is computed and saved in FP8; None for `recipes.coat()`.
      norm: "rms" or "layer"; None for no norm, which is a `Linear`.
      epsilon: added by the norm to the mean square or the variance.
      use_scale: whether the norm has a scale [D].
      scale_plus_one: whether the norm multiplies by 1 + scale, as in Gemma.
      use_norm_bias: whether the norm has a bias [D].
      use_bias: whether the product has a bias [F].
      dtype: dtype of input, output and everything that is not FP8; None
        promotes the input and the parameters.
      param_dtype: dtype of the parameters and their gradients.
      rngs: its stream `params` initializes the parameters.
      **options: initializers and metadata of the parameters, see
        `NormLinearOptions`; flax's other arguments are refused.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is outside its range, `norm` is unknown, or a flax
        argument is not supported by FP8 layers.
    """
    of = options_by_part(options, NormLinearOptions)
    super().__init__(recipe_of(type(self).__name__, recipe), dtype, of.others)
    self._check(
      param_dtype, rngs, in_features=in_features, out_features=out_features
    )
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.norm = make_norm(
      norm,
      in_features,
      epsilon=epsilon,
      use_scale=use_scale,
      scale_plus_one=scale_plus_one,
      use_bias=use_norm_bias,
      **shared,
      **of.norm,
    )
    shared |= dict(use_bias=use_bias, split="columns")
    self.linear = Linear(in_features, out_features, **shared, **of.front)

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Normalizes and multiplies the last axis.

    Args:
      x: [..., in_features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., out_features] in `dtype`.
    """
    gamma, beta, w, bias, cache = FrontWeights.of(self.norm, self.linear)
    y = norm_linear(
      self.cast(x, self.linear.kernel),
      gamma,
      beta,
      w,
      bias,
      **norm_options(self.norm),
      recipe=self.active_recipe,
      cache=cache,
    )
    return reshard(y, out_sharding)
