# SPDX-License-Identifier: Apache-2.0
"""Activation functions of FP8 values in plain jnp: f(x), and gated f(gate) up.

  activation_input         quantizes what the function reads and saves
  activation_fwd           writes the operand of the next product
  activation_bwd           computes the gradient in f32
  activation_bwd_operands  writes the operands of the products before and after

`parts` is (x,), or (gate, up), each [..., F]. `scale` comes from
`activation_input`. The backward recomputes the function's value, for the weight
gradient of the next product.
"""

import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  GRADIENTS,
  VALUES,
  Groups,
  Layout,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.dispatch import op
from coat_jax.ops.functions import (
  activation_derivative,
  activation_values,
  check_activation,
)
from coat_jax.ops.types import Activation

type Parts = tuple[QTensor, ...]


def _check(*_, activation, **__) -> None:
  check_activation(activation)


@op(check=_check, triton="activation")
def activation_input(
  x: Array,
  *,
  activation: Activation,
  gated: bool,
  groups: Groups,
  output: Scaling = VALUES,
) -> tuple[Parts, Scales | None]:
  """Quantizes x [..., F] or [gate, up] [..., 2 F]; finds the output's scale."""
  halves = jnp.split(x, 2, axis=-1) if gated else [x]
  parts = tuple(map(groups.quantize, halves))
  return parts, output.find_scale(activated(parts, activation=activation))


@op(check=_check, triton="activation")
def activation_fwd(
  parts: Parts,
  *,
  activation: Activation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Writes f(x) or f(gate) up as an operand."""
  y = activated(parts, activation=activation)
  return output.quantize(y, scale, layout)


@op(check=_check)
def activation_bwd(
  dy: Array, parts: Parts, *, activation: Activation
) -> tuple[Array, ...]:
  """Computes the gradient of each part in f32."""
  dy = dy.astype(jnp.float32)
  x, *others = (part.dequantize() for part in parts)
  slope = activation_derivative(x, activation=activation)
  if not others:
    return (dy * slope,)
  (up,) = others
  dgate = dy * up * slope
  return dgate, dy * activation_values(x, activation=activation)


@op(check=_check, triton="activation")
def activation_bwd_operands(
  dy: Array,
  parts: Parts,
  *,
  activation: Activation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  has_sums: bool = False,
) -> tuple[Operand, Operand, Array | None]:
  """Writes the gradient of `activation_input`'s x in both layouts, y's columns.

  With `has_sums`, the third result is the gradient summed over rows before it
  is rounded, f32, for the bias of the product before.
  """
  gradients = activation_bwd.definition(dy, parts, activation=activation)
  dx = jnp.concatenate(gradients, axis=-1)
  y = activated(parts, activation=activation)
  sums = jnp.sum(dx.reshape(-1, dx.shape[-1]), axis=0) if has_sums else None
  return (
    gradient.quantize(dx, layout="both"),
    output.quantize(y, scale, "columns"),
    sums,
  )


def activated(parts: Parts, *, activation: Activation) -> Array:
  """Computes f(x) or f(gate) up in f32."""
  x, *others = (part.dequantize() for part in parts)
  y = activation_values(x, activation=activation)
  return y * others[0] if others else y
