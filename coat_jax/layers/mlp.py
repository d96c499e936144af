# SPDX-License-Identifier: Apache-2.0
"""The MLP block: norm, up, GELU, down and residual add.

Saved beside what every block saves: GELU's input in 1 x G FP8. The kernel of
its gradient gives its output again, which the weight's gradient reads.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.layers.activation import gelu
from coat_jax.layers.back import BackWeights
from coat_jax.layers.block import BlockWeights, block
from coat_jax.layers.front import FrontWeights
from coat_jax.layers.linear import Linear, default_kernel_init
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import RecipeModule
from coat_jax.layers.norm import make_norm, norm_options
from coat_jax.layers.residuals import save_residual
from coat_jax.qtensor import QTensor
from coat_jax.recipe import CoatRecipe


class _GELUSaved(NamedTuple):
  x: QTensor
  scale: Array  # Of the output.


@dataclasses.dataclass(frozen=True)
class GELU(Middle):
  """gelu(h) of h [..., F].

  Attributes:
    approximate: the tanh formula, or erf; on a GPU only tanh has a kernel.
  """

  approximate: bool = True

  def plain(self, h, weights, inputs, recipe):
    del weights, inputs
    return gelu(h, approximate=self.approximate, recipe=recipe)

  def forward(self, h, weights, inputs, recipe):
    del weights, inputs
    sizes = self._sizes(recipe)
    x, scale = ops.gelu_input(h, output_dtype=recipe.formats.values, **sizes)
    x = save_residual("activation", x)
    scale = save_residual("linear", scale)
    output = ops.gelu_fwd(x, scale=scale, **sizes)
    return MiddleOutput(output, _GELUSaved(x, scale))

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights
    dh, output = ops.gelu_bwd_operands(
      dout,
      saved.x,
      output_scale=saved.scale,
      approximate=self.approximate,
      group_size=recipe.group_size,
      dtype=recipe.formats.gradients,
      output_dtype=recipe.formats.values,
      implementation=recipe.implementation,
    )
    values = None
    if has_bias:
      values = ops.gelu_bwd(
        dout,
        saved.x,
        approximate=self.approximate,
        group_size=recipe.group_size,
      )
    return MiddleGradient(dh, output, values)

  def _sizes(self, recipe: CoatRecipe) -> dict[str, Any]:
    return dict(
      approximate=self.approximate,
      group_size=recipe.group_size,
      dtype=recipe.formats.values,
      implementation=recipe.implementation,
    )


class MLP(RecipeModule):
  """The MLP half of a transformer's layer: norm, GELU and residual add.

  x + gelu(norm(x) w_up) w_down.

  Example usage::

    >>> from coat_jax import recipe
    >>> from coat_jax.layers import MLP
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> mlp = MLP(64, 256, norm="layer", use_bias=True, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> mlp.up.kernel.shape
    (64, 256)

  Attributes:
    norm: RMSNorm or LayerNorm; None without a norm.
    up: Linear with kernel [features, hidden_features].
    down: Linear with kernel [hidden_features, features].
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    approximate: bool = True,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind | None = "rms",
    epsilon: float = 1e-6,
    use_scale: bool = True,
    use_norm_bias: bool = False,
    use_bias: bool = False,
    add_input: bool = True,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer = default_kernel_init,
    out_init: nnx.Initializer | None = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width inside.
      approximate: GELU by the tanh formula, or by erf; on a GPU only tanh has a
        kernel.
      recipe: what is computed and saved in FP8; None for `recipe.coat()`.
      norm: "rms" or "layer"; None for none, as where norms follow the blocks.
      epsilon: what the norm adds to the mean square or the variance.
      use_scale: whether the norm has a scale [D], initialized with ones.
      use_norm_bias: whether the norm has a bias [D], initialized with zeros.
      use_bias: whether both products have biases, [F] and [D], zeros.
      add_input: whether the block adds its input, the residual stream.
      dtype: of input, output and what is not FP8.
      param_dtype: of the parameters and their gradients.
      kernel_init: initializer of `up`, [D, F].
      out_init: initializer of `down`, [F, D]; None for `kernel_init`.
      rngs: its stream `params` initializes the kernels.
    """
    super().__init__(recipe or recipes.coat(), dtype)
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.approximate, self.add_input = approximate, add_input
    self.norm = make_norm(
      norm,
      features,
      epsilon=epsilon,
      use_scale=use_scale,
      use_bias=use_norm_bias,
      **shared,
    )
    shared |= dict(use_bias=use_bias)
    self.up = Linear(
      features,
      hidden_features,
      kernel_init=kernel_init,
      split="columns",
      **shared,
    )
    self.down = Linear(
      hidden_features,
      features,
      kernel_init=out_init or kernel_init,
      split="inputs",
      **shared,
    )

  def __call__(self, x: Array) -> Array:
    """[..., features] to the same shape, in `dtype`."""
    return block(
      x.astype(self.dtype),
      BlockWeights(
        FrontWeights.of(self.norm, self.up), BackWeights.of(self.down)
      ),
      middle=GELU(self.approximate),
      **norm_options(self.norm),
      add_input=self.add_input,
      recipe=self.active_recipe,
    )
