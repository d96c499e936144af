# SPDX-License-Identifier: Apache-2.0
"""Activation functions of FP8 values in plain jnp: gated functions and GELU.

  *_input         quantizes what the function reads and saves
  *_fwd           writes the operand of the next product
  *_bwd           computes the gradient in f32
  *_bwd_operands  writes the operands of the products before and after

`scale` comes from `*_input`. The backward recomputes the function's value, for
the weight gradient of the next product.
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
  check_approximation,
  gelu_derivative,
  gelu_values,
)
from coat_jax.ops.types import Activation, Approximation


def _check_gated(*_, activation, **__) -> None:
  check_activation(activation)


def _check_gelu(*_, approximate, **__) -> None:
  check_approximation(approximate)


@op()
def activation_fwd(
  x: QTensor, *, activation: Activation, groups: Groups
) -> QTensor:
  """Applies an activation function to 1 x G values; returns 1 x G values."""
  y = activation_values(x.dequantize(), activation=activation)
  return groups.quantize(y)


@op()
def activation_bwd(dy: Array, x: QTensor, *, activation: Activation) -> Array:
  """Computes the gradient of an activation function in f32."""
  slope = activation_derivative(x.dequantize(), activation=activation)
  return dy.astype(jnp.float32) * slope


@op()
def mul_fwd(a: QTensor, b: QTensor, *, output: Scaling = VALUES) -> Operand:
  """Multiplies 1 x G values; returns an operand's rows."""
  return output.quantize(a.dequantize() * b.dequantize())


@op()
def mul_bwd(dy: Array, a: QTensor, b: QTensor) -> tuple[Array, Array]:
  """Computes the gradients (dy b, dy a) in f32."""
  dy = dy.astype(jnp.float32)
  return dy * b.dequantize(), dy * a.dequantize()


@op(check=_check_gated, triton="gated")
def gated_input(
  gate_up: Array,
  *,
  activation: Activation,
  groups: Groups,
  output: Scaling = VALUES,
) -> tuple[QTensor, QTensor, Scales | None]:
  """Quantizes [gate, up], [..., 2 F], in groups; finds the scale of f(gate) up.

  Returns gate and up [..., F] each, and the scale for `output`.
  """
  gate, up = map(groups.quantize, jnp.split(gate_up, 2, axis=-1))
  return gate, up, output.find_scale(_gated_product(gate, up, activation))


@op(check=_check_gated, triton="gated")
def gated_fwd(
  gate: QTensor,
  up: QTensor,
  *,
  activation: Activation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Writes f(gate) up as an operand."""
  product = _gated_product(gate, up, activation)
  return output.quantize(product, scale, layout)


@op()
def gated_bwd(
  dy: Array, gate: QTensor, up: QTensor, *, activation: Activation
) -> tuple[Array, Array]:
  """Computes (dgate, dup) in f32."""
  dy = dy.astype(jnp.float32)
  gate_values = gate.dequantize()
  slope = activation_derivative(gate_values, activation=activation)
  dgate = dy * up.dequantize() * slope
  return dgate, dy * activation_values(gate_values, activation=activation)


@op(check=_check_gated, triton="gated")
def gated_bwd_operands(
  dy: Array,
  gate: QTensor,
  up: QTensor,
  *,
  activation: Activation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
) -> tuple[Operand, Operand]:
  """Writes the gradient of [gate, up], [..., 2 F], and f(gate) up's columns."""
  gradients = gated_bwd.definition(dy, gate, up, activation=activation)
  dgate_up = jnp.concatenate(gradients, axis=-1)
  product = _gated_product(gate, up, activation)
  return (
    gradient.quantize(dgate_up, layout="both"),
    output.quantize(product, scale, "columns"),
  )


def _gated_product(gate: QTensor, up: QTensor, activation: Activation) -> Array:
  """Computes f(gate) up in f32."""
  y = activation_values(gate.dequantize(), activation=activation)
  return y * up.dequantize()


@op(check=_check_gelu, triton="gelu")
def gelu_input(
  x: Array,
  *,
  approximate: Approximation,
  groups: Groups,
  output: Scaling = VALUES,
) -> tuple[QTensor, Scales | None]:
  """Quantizes x [..., F] in groups and finds the scale of gelu(x)."""
  x_q = groups.quantize(x)
  y = gelu_values(x_q.dequantize(), approximate=approximate)
  return x_q, output.find_scale(y)


@op(check=_check_gelu, triton="gelu")
def gelu_fwd(
  x: QTensor,
  *,
  approximate: Approximation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Writes gelu(x) as an operand."""
  y = gelu_values(x.dequantize(), approximate=approximate)
  return output.quantize(y, scale, layout)


@op()
def gelu_bwd(dy: Array, x: QTensor, *, approximate: Approximation) -> Array:
  """Computes the gradient of GELU in f32."""
  slope = gelu_derivative(x.dequantize(), approximate=approximate)
  return dy.astype(jnp.float32) * slope


@op(check=_check_gelu, triton="gelu")
def gelu_bwd_operands(
  dy: Array,
  x: QTensor,
  *,
  approximate: Approximation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  has_sums: bool = False,
) -> tuple[Operand, Operand, Array | None]:
  """Writes the gradient of x [..., F] in both layouts, and gelu(x)'s columns.

  With `has_sums`, the third result is the gradient summed over rows before it
  is rounded, f32 [F], for a bias before GELU.
  """
  dx = gelu_bwd.definition(dy, x, approximate=approximate)
  y = gelu_values(x.dequantize(), approximate=approximate)
  sums = jnp.sum(dx.reshape(-1, dx.shape[-1]), axis=0) if has_sums else None
  return (
    gradient.quantize(dx, layout="both"),
    output.quantize(y, scale, "columns"),
    sums,
  )
