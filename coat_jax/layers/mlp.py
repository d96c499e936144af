# SPDX-License-Identifier: Apache-2.0
"""The MLP block: norm, up, GELU, down and residual add.

Besides what every block saves, GELU's input is saved in 1 x G FP8. The kernel
for GELU's gradient also recomputes GELU's output, for the weight's gradient.
"""

import dataclasses
from typing import Any, NamedTuple, Unpack

from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.layers.activation import gelu
from coat_jax.layers.block import block
from coat_jax.layers.block_module import BlockOptions, Parts, block_arguments
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import RecipeModule, Sharding, reshard
from coat_jax.layers.operands import (
  gradient_scaling,
  groups_of,
  value_scaling,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops.functions import check_approximation


class _GELUSaved(NamedTuple):
  x: QTensor
  scale: ops.Scales | None  # The output's scale; None for blocks.


@dataclasses.dataclass(frozen=True)
class GELU(Middle):
  """gelu(h) of h [..., F].

  Attributes:
    approximate: the tanh formula, erf (False), or "sigmoid": x sigmoid(1.702
      x), the quick GELU of CLIP; erf has no GPU kernel.

  Raises:
    ValueError: the approximation is unknown.
  """

  approximate: ops.Approximation = True

  def __post_init__(self):
    check_approximation(self.approximate)

  def plain(self, h, weights, inputs, recipe):
    del weights, inputs
    return gelu(h, approximate=self.approximate, recipe=recipe)

  def forward(self, h, weights, inputs, recipe):
    del weights, inputs
    how: Any = dict(
      approximate=self.approximate,
      output=value_scaling(recipe),
      implementation=recipe.implementation,
    )
    x, scale = ops.gelu_input(h, groups=groups_of(recipe), **how)
    x = save_residual("activation", x)
    scale = save_residual("linear", scale)
    output = ops.gelu_fwd(x, scale=scale, **how)
    return MiddleOutput(output, _GELUSaved(x, scale))

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights
    dh, output, sums = ops.gelu_bwd_operands(
      dout,
      saved.x,
      approximate=self.approximate,
      gradient=gradient_scaling(recipe),
      output=value_scaling(recipe),
      scale=saved.scale,
      has_sums=has_bias,
      implementation=recipe.implementation,
    )
    return MiddleGradient(dh, output, sums=sums)


class MLP(RecipeModule):
  """The MLP half of a transformer's layer: norm, GELU and residual add.

  x + post_norm(gelu(norm(x) w_up) w_down).

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import MLP
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> mlp = MLP(64, 256, norm="layer", use_bias=True, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> mlp.up.kernel.shape
    (64, 256)

  Attributes:
    norm, post_norm: RMSNorm or LayerNorm; None without this norm.
    up: Linear with kernel [features, hidden_features].
    down: Linear with kernel [hidden_features, features].
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    approximate: ops.Approximation = True,
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width inside.
      approximate: how GELU is computed, see `GELU`.
      rngs: its stream `params` initializes the parameters.
      **options: see `BlockOptions`; biases are [F] and [D].

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, or `approximate` or a norm is
        unknown.
    """
    parts = Parts.of("MLP", options, rngs)
    super().__init__(
      **parts.shared,
      features=features,
      hidden_features=hidden_features,
    )
    self.approximate: ops.Approximation = GELU(approximate).approximate
    self.add_input = parts.add_input
    self.norm = parts.make_norm(parts.norm, features)
    self.up = parts.make_front(features, hidden_features)
    self.down = parts.make_back(hidden_features, features)
    self.post_norm = parts.make_norm(parts.post_norm, features)

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Runs the block.

    Args:
      x: [..., features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., features] in `dtype`.
    """
    y = block(
      self.cast(x, self.up.kernel),
      middle=GELU(self.approximate),
      **block_arguments(self, self.norm, self.up, self.down),
    )
    return reshard(y, out_sharding)
