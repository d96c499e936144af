# SPDX-License-Identifier: Apache-2.0
"""Module of a norm and the linear layer that reads it, fused."""

import dataclasses
from typing import Unpack

from flax import nnx
from jax import Array

from coat_jax.layers.block_module import NormLinearOptions, Parts
from coat_jax.layers.linear import norm_linear
from coat_jax.layers.module import RecipeModule, Sharding, reshard
from coat_jax.layers.norm import norm_options
from coat_jax.layers.product import LinearWeights


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
    known = NormLinearOptions.__annotations__
    parts = Parts.of("NormLinear", options, rngs, known)
    parts = dataclasses.replace(parts, use_bias=use_bias)
    super().__init__(
      **parts.shared,
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
