# SPDX-License-Identifier: Apache-2.0
"""Activation functions of FP8 values in plain jnp: gated ones, and GELU.

For each function: what it reads and saves for the backward pass (`*_input`);
the operand of the next product (`*_fwd`); its gradient in f32 (`*_bwd`), and as
operands of the products on both sides (`*_bwd_operands`). `functions` has their
values and derivatives.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3, E5M2
from coat_jax.ops.blocks import quantize_blocks, values_to_operand
from coat_jax.ops.dispatch import op
from coat_jax.ops.functions import (
  activation_derivative,
  activation_values,
  check_activation,
  check_approximation,
  gelu_derivative,
  gelu_values,
)
from coat_jax.ops.quantize import quantize_groups, quantize_tensor, tensor_scale
from coat_jax.ops.types import Activation, Approximation, Layout, Operand
from coat_jax.qtensor import QTensor, dequantize
from coat_jax.recipe import Scaling


def _check_gated(*args, activation, **kwargs) -> None:
  del args, kwargs
  check_activation(activation)


def _check_gelu(*args, approximate, **kwargs) -> None:
  del args, kwargs
  check_approximation(approximate)


@op()
def activation_fwd(
  x: QTensor,
  *,
  activation: Activation,
  group_size: int,
  dtype: DTypeLike = E4M3,
) -> QTensor:
  """An activation function from 1 x G values to 1 x G values."""
  values = dequantize(x, group_size=group_size)
  y = activation_values(values, activation=activation)
  return quantize_groups.definition(y, group_size=group_size, dtype=dtype)


@op()
def activation_bwd(
  dy: Array, x: QTensor, *, activation: Activation, group_size: int
) -> Array:
  """Gradient of an activation function, f32."""
  values = dequantize(x, group_size=group_size)
  slope = activation_derivative(values, activation=activation)
  return dy.astype(jnp.float32) * slope


@op()
def mul_fwd(
  a: QTensor,
  b: QTensor,
  *,
  group_size: int,
  dtype: DTypeLike = E4M3,
  scaling: Scaling = "tensor",
  axis_names: tuple[str, ...] = (),
) -> Operand:
  """Product of 1 x G values to an operand's rows."""
  product = dequantize(a, group_size=group_size) * dequantize(
    b, group_size=group_size
  )
  if scaling == "block":
    return quantize_blocks.definition(product, dtype=dtype)
  return quantize_tensor.definition(product, dtype=dtype, axis_names=axis_names)


@op()
def mul_bwd(
  dy: Array, a: QTensor, b: QTensor, *, group_size: int
) -> tuple[Array, Array]:
  """Gradients (dy b, dy a), f32."""
  dy = dy.astype(jnp.float32)
  da = dy * dequantize(b, group_size=group_size)
  return da, dy * dequantize(a, group_size=group_size)


@op(check=_check_gated, triton="gated")
def gated_input(
  gate_up: Array,
  *,
  activation: Activation,
  group_size: int,
  dtype: DTypeLike = E4M3,
  product_dtype: DTypeLike = E4M3,
  axis_names: tuple[str, ...] = (),
) -> tuple[QTensor, QTensor, Array]:
  """What a gated function reads and saves: 1 x G values, the product's scale.

  Args:
    gate_up: [..., 2 F], gate first.
    activation: f in f(gate) up.
    group_size: of the values.
    dtype: format of the values.
    product_dtype: format of f(gate) up.

  Returns:
    gate and up in `dtype`, [..., F] each, and the scale of f(gate) up.
  """
  gate, up = jnp.split(gate_up, 2, axis=-1)
  how = dict(group_size=group_size, dtype=dtype)
  gate_q = quantize_groups.definition(gate, **how)
  up_q = quantize_groups.definition(up, **how)
  product = _gated_product(gate_q, up_q, activation, group_size)
  scale = tensor_scale.definition(
    product, dtype=product_dtype, axis_names=axis_names
  )
  return gate_q, up_q, scale


@op(check=_check_gated, triton="gated")
def gated_fwd(
  gate: QTensor,
  up: QTensor,
  *,
  activation: Activation,
  scale: Array | None,
  group_size: int,
  layout: Layout = "rows",
  dtype: DTypeLike = E4M3,
) -> Operand:
  """f(gate) up from 1 x G values to an operand; scale None: in blocks."""
  product = _gated_product(gate, up, activation, group_size)
  return values_to_operand(product, scale=scale, layout=layout, dtype=dtype)


@op()
def gated_bwd(
  dy: Array,
  gate: QTensor,
  up: QTensor,
  *,
  activation: Activation,
  group_size: int,
) -> tuple[Array, Array]:
  """Gradients (dgate, dup), f32, the activation recomputed from the gate."""
  dy = dy.astype(jnp.float32)
  gate_values = dequantize(gate, group_size=group_size)
  up_values = dequantize(up, group_size=group_size)
  slope = activation_derivative(gate_values, activation=activation)
  dgate = dy * up_values * slope
  return dgate, dy * activation_values(gate_values, activation=activation)


@op(check=_check_gated, triton="gated")
def gated_bwd_operands(
  dy: Array,
  gate: QTensor,
  up: QTensor,
  *,
  activation: Activation,
  product_scale: Array | None,
  group_size: int,
  dtype: DTypeLike = E5M2,
  product_dtype: DTypeLike = E4M3,
  axis_names: tuple[str, ...] = (),
) -> tuple[Operand, Operand]:
  """`gated_bwd` to the operands of the products in front and behind.

  Args:
    dy: [..., F], gradient of f(gate) up.
    gate, up: what `gated_input` returned.
    activation: f.
    product_scale: the scale it returned; None for operands in blocks of 128.
    group_size: of gate and up.
    dtype: format of the gradient.
    product_dtype: format of the product.

  Returns:
    The gradient of [gate, up], [..., 2 F] with one scale, in both layouts; and
    the product again, its columns, for the weight gradient.
  """
  gradients = gated_bwd.definition(
    dy, gate, up, activation=activation, group_size=group_size
  )
  dgate_up = jnp.concatenate(gradients, axis=-1)
  product = gated_fwd.definition(
    gate,
    up,
    activation=activation,
    scale=product_scale,
    group_size=group_size,
    layout="columns",
    dtype=product_dtype,
  )
  return _gradient_operand(dgate_up, product_scale, dtype, axis_names), product


def _gated_product(
  gate: QTensor, up: QTensor, activation: Activation, group_size: int
) -> Array:
  """f(gate) up in f32."""
  gate_values = dequantize(gate, group_size=group_size)
  y = activation_values(gate_values, activation=activation)
  return y * dequantize(up, group_size=group_size)


@op(check=_check_gelu, triton="gelu")
def gelu_input(
  x: Array,
  *,
  approximate: Approximation,
  group_size: int,
  dtype: DTypeLike = E4M3,
  output_dtype: DTypeLike = E4M3,
  axis_names: tuple[str, ...] = (),
) -> tuple[QTensor, Array]:
  """What GELU reads and saves: 1 x G values, and its output's scale.

  Args:
    x: [..., F].
    approximate: see `gelu_values`.
    group_size: of the values.
    dtype: format of the values.
    output_dtype: format of gelu(x).

  Returns:
    x in `dtype`, [..., F], and the scale of gelu(x).
  """
  x_q = quantize_groups.definition(x, group_size=group_size, dtype=dtype)
  values = dequantize(x_q, group_size=group_size)
  y = gelu_values(values, approximate=approximate)
  scale = tensor_scale.definition(y, dtype=output_dtype, axis_names=axis_names)
  return x_q, scale


@op(check=_check_gelu, triton="gelu")
def gelu_fwd(
  x: QTensor,
  *,
  approximate: Approximation,
  scale: Array | None,
  group_size: int,
  layout: Layout = "rows",
  dtype: DTypeLike = E4M3,
) -> Operand:
  """GELU from 1 x G values to an operand; scale None: in blocks of 128."""
  values = dequantize(x, group_size=group_size)
  y = gelu_values(values, approximate=approximate)
  return values_to_operand(y, scale=scale, layout=layout, dtype=dtype)


@op()
def gelu_bwd(
  dy: Array, x: QTensor, *, approximate: Approximation, group_size: int
) -> Array:
  """Gradient of GELU, f32."""
  values = dequantize(x, group_size=group_size)
  slope = gelu_derivative(values, approximate=approximate)
  return dy.astype(jnp.float32) * slope


@op(check=_check_gelu, triton="gelu")
def gelu_bwd_operands(
  dy: Array,
  x: QTensor,
  *,
  approximate: Approximation,
  output_scale: Array | None,
  group_size: int,
  dtype: DTypeLike = E5M2,
  output_dtype: DTypeLike = E4M3,
  has_sums: bool = False,
  axis_names: tuple[str, ...] = (),
) -> tuple[Operand, Operand, Array | None]:
  """`gelu_bwd` to the operands of the products on both sides of GELU.

  Args:
    dy: [..., F], gradient of gelu(x).
    x: what `gelu_input` returned.
    approximate: see `gelu_values`.
    output_scale: the scale that `gelu_input` returned; None for operands in
      blocks of 128.
    group_size: of x.
    dtype: format of the gradient.
    output_dtype: format of gelu(x).
    has_sums: whether the gradient of a bias in front of GELU is wanted.

  Returns:
    The gradient of x in both layouts; gelu(x) again, its columns; and the
    gradient's sum over rows before it is rounded, f32 [F], or None.
  """
  dx = gelu_bwd.definition(
    dy, x, approximate=approximate, group_size=group_size
  )
  output = gelu_fwd.definition(
    x,
    approximate=approximate,
    scale=output_scale,
    group_size=group_size,
    layout="columns",
    dtype=output_dtype,
  )
  sums = jnp.sum(dx.reshape(-1, dx.shape[-1]), axis=0) if has_sums else None
  return _gradient_operand(dx, output_scale, dtype, axis_names), output, sums


def _gradient_operand(g, output_scale, dtype, axis_names) -> Operand:
  """A gradient in both layouts, in blocks if the output is."""
  if output_scale is None:
    return quantize_blocks.definition(g, dtype=dtype, layout="both")
  return quantize_tensor.definition(
    g, dtype=dtype, layout="both", axis_names=axis_names
  )
