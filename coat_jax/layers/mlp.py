# SPDX-License-Identifier: Apache-2.0
"""The MLP block: norm, up, GELU, down and residual add.

Saved besides what every block saves: GELU's input in 1 x G FP8. The kernel of
GELU's gradient recomputes its output, which the weight's gradient reads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.activation import gelu
from coat_jax.layers.back import BackWeights
from coat_jax.layers.block import BlockWeights, block
from coat_jax.layers.front import FrontWeights
from coat_jax.layers.linear import Linear
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  recipe_of,
  reshard,
)
from coat_jax.layers.norm import block_norm_options, make_norm
from coat_jax.layers.operands import (
  gradient_scaling,
  groups_of,
  value_scaling,
)
from coat_jax.layers.parameters import BlockOptions, options_by_part
from coat_jax.layers.residuals import save_residual
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops.functions import check_approximation


class _GELUSaved(NamedTuple):
  x: QTensor
  scale: ops.Scales | None  # The output's scale; None in blocks.


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

  counterparts = (nnx.Linear,)

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    approximate: ops.Approximation = True,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind | None = "rms",
    post_norm: ops.NormKind | None = None,
    epsilon: float = 1e-6,
    use_scale: bool = True,
    scale_plus_one: bool = False,
    use_norm_bias: bool = False,
    use_bias: bool = False,
    add_input: bool = True,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width inside.
      approximate: GELU by the tanh formula, by erf (False), or "sigmoid": x
        sigmoid(1.702 x), the quick GELU of CLIP; erf has no GPU kernel.
      recipe: what is computed and saved in FP8; None for `recipes.coat()`.
      norm: norm of the input, "rms" or "layer"; None for none.
      post_norm: norm of the second product, before the input is added, "rms" or
        "layer"; None for none. OLMo 2 uses only this norm, Gemma 2 and 3 use
        both.
      epsilon: added by norms to the mean square or the variance.
      use_scale: whether norms have a scale [D].
      scale_plus_one: whether norms multiply by 1 + scale, as in Gemma.
      use_norm_bias: whether norms have a bias [D].
      use_bias: whether both products have biases, [F] and [D].
      add_input: whether the block adds its input, the residual stream.
      dtype: dtype of input, output and everything that is not FP8; None
        promotes the input and the parameters.
      param_dtype: dtype of the parameters and their gradients.
      rngs: its stream `params` initializes the parameters.
      **options: initializers and metadata of the parameters, see
        `BlockOptions`; flax's other arguments are refused.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is outside its range, `approximate` or a norm is
        unknown, or a flax argument is not supported by FP8 layers.
    """
    of = options_by_part(options)
    super().__init__(recipe_of(type(self).__name__, recipe), dtype, of.others)
    self._check(
      param_dtype, rngs, features=features, hidden_features=hidden_features
    )
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.approximate: ops.Approximation = GELU(approximate).approximate
    self.add_input = add_input
    norm_of = functools.partial(
      make_norm,
      num_features=features,
      epsilon=epsilon,
      use_scale=use_scale,
      scale_plus_one=scale_plus_one,
      use_bias=use_norm_bias,
      **shared,
      **of.norm,
    )
    self.norm = norm_of(norm)
    shared |= dict(use_bias=use_bias)
    self.up = Linear(
      features,
      hidden_features,
      split="columns",
      **shared,
      **of.front,
    )
    self.down = Linear(
      hidden_features,
      features,
      split="inputs",
      **shared,
      **of.back,
    )
    self.post_norm = norm_of(post_norm)

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
      BlockWeights(
        FrontWeights.of(self.norm, self.up),
        BackWeights.of(self.down, self.post_norm),
      ),
      middle=GELU(self.approximate),
      **block_norm_options(self.norm, self.post_norm),
      add_input=self.add_input,
      recipe=self.active_recipe,
    )
    return reshard(y, out_sharding)
