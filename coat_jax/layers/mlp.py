# SPDX-License-Identifier: Apache-2.0
"""The MLP block: norm, up, activation, down and residual add.

A gated MLP computes gate and up in one matmul with a weight [D, 2, F]. A shard
of F then holds the same columns of gate and of up.

The middle saves the activation's input (gate and up) in FP8, in 1 x G groups.
With residuals="coat", a gated MLP also saves f(gate) and f(gate) * up in FP8,
as the reference implementation does.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.layers.activation import plain_activation
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
from coat_jax.numerics.checks import check_flags
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Operand
from coat_jax.ops.activation import check_activation


class _Saved(NamedTuple):
  parts: tuple[QTensor, ...]  # (h,) or (gate, up).
  activated: QTensor | None = None  # f(gate); None if it is recomputed.
  # f(gate) * up in row layout; None if it is recomputed.
  product: Operand | None = None
  scale: ops.Scales | None = None  # For recomputing `product`.


@dataclasses.dataclass(frozen=True)
class Elementwise(Middle):
  """Computes f(gate) * up, or f(h) without a gate.

  With a gate, the first weight is [D, 2, F], gate first; without one, [D, F].
  The second weight is [F, D].

  Attributes:
    activation: f, see `activate`. With a gate, "silu" is SwiGLU, and
      "gelu_tanh" and "gelu" are GeGLU. "gelu" (erf) has no GPU kernel.
    gated: whether there is a gate.

  Raises:
    ValueError: the activation is unknown.
  """

  activation: ops.Activation = "silu"
  gated: bool = True

  def __post_init__(self):
    check_activation(self.activation)
    check_flags("MLP", gated=self.gated)

  def check(self, x, weights, inputs, recipe):
    if not self.gated:
      return
    front, back = weights.front.w, weights.back.w
    fits = front.ndim == 3 and front.shape[1] == 2
    # With mesh axes, the caller may run this in shard_map, on shards.
    if not fits or front.shape[2] != back.shape[0] and not recipe.axes:
      raise ValueError(
        "Elementwise: front.w must be [D, 2, F] and back.w [F, D] with a gate, "
        f"got {front.shape} and {back.shape}; pass the weights of one MLP"
      )

  def plain(self, h, weights, inputs, recipe):
    del weights, inputs, recipe
    parts = (h[..., 0, :], h[..., 1, :]) if self.gated else (h,)
    return plain_activation(parts, self.activation)

  def forward(self, h, weights, inputs, recipe):
    del weights, inputs
    output, groups = value_scaling(recipe), groups_of(recipe)
    how: Any = dict(
      activation=self.activation,
      output=output,
      implementation=recipe.implementation,
    )
    parts, scale = ops.activation_input(
      h, gated=self.gated, groups=groups, **how
    )
    parts = save_residual("activation", parts)
    if self.gated and recipe.residuals == "coat":
      gate, up = parts
      y = ops.activation_values(gate.dequantize(), activation=self.activation)
      activated = save_residual("activation", groups.quantize(y))
      product = output.quantize(activated.dequantize() * up.dequantize())
      kept = save_residual("linear", product)
      return MiddleOutput(product, _Saved(parts, activated, kept))
    scale = save_residual("linear", scale)
    product = ops.activation_fwd(parts, scale=scale, **how)
    return MiddleOutput(product, _Saved(parts, scale=scale))

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights
    if saved.activated is None:
      dh, product, sums, _ = ops.activation_bwd_operands(
        dout,
        saved.parts,
        activation=self.activation,
        gradient=gradient_scaling(recipe),
        output=value_scaling(recipe),
        scale=saved.scale,
        # The GPU kernel computes bias gradients only without a gate.
        has_sums=has_bias and not self.gated,
        implementation=recipe.implementation,
      )
      if has_bias and self.gated:
        return MiddleGradient(dh, product, self._gradient(saved, dout))
      return MiddleGradient(dh, product, sums)
    values = self._gradient(saved, dout)
    # Transpose the product here. If `forward` saved the column layout instead,
    # XLA would hold both layouts of all layers in memory at once.
    product = columns_of(saved.product, recipe)
    return MiddleGradient(gradient_operand(values, recipe), product, values)

  def _gradient(self, saved, dout) -> Array:
    """Computes the gradients of gate and up, joined to f32 [..., 2 F]."""
    backward = functools.partial(ops.activation_bwd, activation=self.activation)
    if saved.activated is None:
      gradients = backward(dout, saved.parts)
    else:
      (gate, up), dout = saved.parts, dout.astype(jnp.float32)
      dup = dout * saved.activated.dequantize()
      dactivated = dout * up.dequantize()
      gradients = *backward(dactivated, (gate,)), dup
    return jnp.concatenate(gradients, axis=-1)


class MLP(RecipeModule):
  """The MLP half of a transformer layer, with or without a gate.

  x + post_norm((f(norm(x) w_gate) * (norm(x) w_up)) w_down), or without a gate
  x + post_norm(f(norm(x) w_up) w_down).

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import MLP
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> mlp = MLP(64, 192, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> mlp.gate_up.kernel.shape
    (64, 2, 192)
    >>> mlp = MLP(64, 256, activation="gelu", gated=False, rngs=nnx.Rngs(0))
    >>> mlp.up.kernel.shape
    (64, 256)

  Attributes:
    norm, post_norm: RMSNorm or LayerNorm, or None.
    gate_up: Linear with kernel [features, 2, hidden_features], gate first; None
      without a gate.
    up: Linear with kernel [features, hidden_features]; None with a gate.
    down: Linear with kernel [hidden_features, features].
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    activation: ops.Activation = "silu",
    gated: bool = True,
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      hidden_features: F, width of the hidden layer.
      activation: f, see `Elementwise`.
      gated: whether there is a gate.
      rngs: its `params` stream provides the keys for initializers.
      **options: see `BlockOptions`. The first bias is [2, F], or [F] without a
        gate; the second is [D].

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, or an activation or norm is
        unknown.
    """
    parts = Parts.of("MLP", options, rngs)
    super().__init__(
      **parts.shared,
      features=features,
      hidden_features=hidden_features,
    )
    self.middle = Elementwise(activation, gated)
    self.add_input = parts.add_input
    self.norm = parts.make_norm(parts.norm, features)
    inside: Any = (2, hidden_features) if gated else hidden_features
    front = parts.make_front(features, inside)
    self.gate_up: Any = front if gated else None
    self.up: Any = None if gated else front
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
    front = self.gate_up if self.middle.gated else self.up
    y = block(
      self.cast(x, front.kernel),
      middle=self.middle,
      **block_arguments(self, self.norm, front, self.down),
    )
    return reshard(y, out_sharding)
