# SPDX-License-Identifier: Apache-2.0
"""The gated MLP block: norm, gate and up, activation, down and residual add.

Gate and up are one matmul with one weight [D, 2, F] (a shard of the last axis
holds both gate and up for its columns), and their gradients share one E5M2
scale.

Besides what every block saves, gate and up are saved in 1 x G FP8. With
residuals="coat" the activation's output and the product are saved too, as in
the reference; the product then reads the activation's output from FP8.
"""

import dataclasses
from typing import Any, NamedTuple, Unpack, get_args

import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.layers.activation import plain_gated
from coat_jax.layers.block import block
from coat_jax.layers.block_module import BlockOptions, Parts, block_arguments
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import RecipeModule, Sharding, reshard
from coat_jax.layers.operands import (
  columns_of,
  gradient_operand,
  gradient_scaling,
  groups_of,
  value_scaling,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Operand


class _GatedSaved(NamedTuple):
  gate: QTensor
  up: QTensor
  # None if they are recomputed.
  activated: QTensor | None = None
  product: Operand | None = None  # Rows.
  scale: ops.Scales | None = None  # The scale of a recomputed product.


@dataclasses.dataclass(frozen=True)
class Gated(Middle):
  """activation(gate) * up of h [..., 2, F], gate first.

  The front's w is [D, 2, F] and its bias [2, F]; the back's w is [F, D].

  Attributes:
    activation: "silu" makes a SwiGLU, "gelu_tanh" and "gelu" a GeGLU, with
      the tanh approximation or with erf; erf has no GPU kernel.

  Raises:
    ValueError: the activation is unknown.
  """

  activation: ops.Activation = "silu"

  def __post_init__(self):
    known = get_args(ops.Activation)
    if self.activation not in known:
      raise ValueError(
        f"Gated: activation must be one of {known}, got {self.activation!r}; "
        "pass one of these"
      )

  def check(self, x, weights, inputs, recipe):
    front, back = weights.front.w, weights.back.w
    fits = front.ndim == 3 and front.shape[1] == 2
    # With axes, a caller's own shard_map may pass shards of other widths.
    if not fits or front.shape[2] != back.shape[0] and not recipe.axes:
      raise ValueError(
        "Gated: front.w must be [D, 2, F] and back.w [F, D], got "
        f"{front.shape} and {back.shape}; pass weights that belong together"
      )

  def plain(self, h, weights, inputs, recipe):
    del weights, inputs, recipe
    return plain_gated(h[..., 0, :], h[..., 1, :], activation=self.activation)

  def forward(self, h, weights, inputs, recipe):
    del weights, inputs
    scaling, groups = value_scaling(recipe), groups_of(recipe)
    how: Any = dict(implementation=recipe.implementation)
    of_gate: Any = how | dict(activation=self.activation)
    gate, up, scale = ops.gated_input(
      h, groups=groups, output=scaling, **of_gate
    )
    gate, up = save_residual("activation", (gate, up))
    if recipe.residuals == "coat":
      activated = ops.activation_fwd(gate, groups=groups, **of_gate)
      activated = save_residual("activation", activated)
      product = ops.mul_fwd(activated, up, output=scaling, **how)
      kept = save_residual("linear", product)
      return MiddleOutput(product, _GatedSaved(gate, up, activated, kept))
    scale = save_residual("linear", scale)
    product = ops.gated_fwd(gate, up, output=scaling, scale=scale, **of_gate)
    return MiddleOutput(product, _GatedSaved(gate, up, scale=scale))

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights
    if saved.activated is None:
      dh, product = ops.gated_bwd_operands(
        dout,
        saved.gate,
        saved.up,
        activation=self.activation,
        gradient=gradient_scaling(recipe),
        output=value_scaling(recipe),
        scale=saved.scale,
        implementation=recipe.implementation,
      )
      values = self._gradient(saved, dout) if has_bias else None
      return MiddleGradient(dh, product, values)
    values = self._gradient(saved, dout)
    # Do not save columns: XLA would stack those of all layers as rows, then
    # transpose them all before the backward, and hold both stacks at its peak.
    product = columns_of(saved.product, recipe)
    return MiddleGradient(gradient_operand(values, recipe), product, values)

  def _gradient(self, saved, dout) -> Array:
    """Computes the gradient of h, f32 [..., 2 F]."""
    how: Any = dict(activation=self.activation)
    if saved.activated is None:
      gradients = ops.gated_bwd(dout, saved.gate, saved.up, **how)
    else:
      dy, dup = ops.mul_bwd(dout, saved.activated, saved.up)
      gradients = ops.activation_bwd(dy, saved.gate, **how), dup
    return jnp.concatenate(gradients, axis=-1)


class GatedMLP(RecipeModule):
  """The MLP half of a decoder layer: norm, gated activation and residual add.

  x + post_norm((activation(norm(x) w_gate) * (norm(x) w_up)) w_down).

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import GatedMLP
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> mlp = GatedMLP(64, 192, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> mlp.gate_up.kernel.shape
    (64, 2, 192)

  Attributes:
    norm, post_norm: RMSNorm or LayerNorm; None without this norm.
    gate_up: Linear with kernel [features, 2, hidden_features], gate first.
    down: Linear with kernel [hidden_features, features].
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    activation: ops.Activation = "silu",
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width of gate and up.
      activation: activation of the gate, see `Gated`.
      rngs: its stream `params` initializes the parameters.
      **options: see `BlockOptions`; biases are [2, F] and [D].

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, or an activation or norm is
        unknown.
    """
    parts = Parts.of("GatedMLP", options, rngs)
    super().__init__(
      **parts.shared,
      features=features,
      hidden_features=hidden_features,
    )
    self.activation: ops.Activation = Gated(activation).activation
    self.add_input = parts.add_input
    self.norm = parts.make_norm(parts.norm, features)
    self.gate_up = parts.make_front(features, (2, hidden_features))
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
      self.cast(x, self.gate_up.kernel),
      middle=Gated(self.activation),
      **block_arguments(self, self.norm, self.gate_up, self.down),
    )
    return reshard(y, out_sharding)
