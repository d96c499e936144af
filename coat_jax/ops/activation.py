# SPDX-License-Identifier: Apache-2.0
"""Activation functions of FP8 values in plain jnp: f(x) or f(gate) * up.

`parts` contains the quantized input, as `QTensor`s [..., F]: (x,), or
(gate, up) if the function is gated. `scale` is the output's scale, which
`activation_input` finds. `activation_bwd_operands` recomputes the output,
because the weight gradient of the next matmul needs it.

A `factor` [..., 1] multiplies each row of the output, and thus each row of the
input's gradient. A row whose factor is 0 becomes 0, even if it contains NaN.

We write (1 + tanh(u)) / 2 as sigmoid(2 u), because 1 + tanh(u) loses its
significant bits if tanh(u) is near -1.
"""

from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import check_choice, check_numeric
from coat_jax.numerics.formats import E5M2, qmax
from coat_jax.numerics.qtensor import (
  QTensor,
  group_amax,
  join_groups,
  split_groups,
)
from coat_jax.numerics.scaling import (
  GRADIENTS,
  VALUES,
  Groups,
  Operand,
  PerTensor,
  Scales,
  Scaling,
)
from coat_jax.ops.dispatch import op, target
from coat_jax.ops.tpu import codes_in_groups, in_groups, read_again
from coat_jax.ops.types import Activation

type Parts = tuple[QTensor, ...]

_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715
_QUICK = 1.702

# For all functions f, |f'(x)| < _STEEPEST and |f(x)| <= |x|.
_STEEPEST = 1.13


def check_activation(activation: Any) -> None:
  """Raises a ValueError if `activation` is unknown."""
  remedy = "pass gelu_tanh for GELU by the tanh formula, gelu for GELU by erf"
  choices = get_args(Activation)
  check_choice("activation", "activation", activation, choices, remedy)


def _checked(x: Any, activation: Any) -> Array:
  """Checks the arguments; returns x in f32."""
  check_activation(activation)
  check_numeric("activation", "x", x, "pass a float array")
  return x.astype(jnp.float32)


def activation_values(x: Array, *, activation: Activation) -> Array:
  """Computes an activation function of x in f32."""
  x = _checked(x, activation)
  if activation == "silu":
    return x * jax.nn.sigmoid(x)
  if activation == "gelu_quick":
    return x * jax.nn.sigmoid(_QUICK * x)
  if activation == "gelu_tanh":
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    return x * jax.nn.sigmoid(2 * inner)
  return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


def activation_derivative(x: Array, *, activation: Activation) -> Array:
  """Computes the derivative of an activation function at x in f32."""
  x = _checked(x, activation)
  if activation == "silu":
    sigmoid = jax.nn.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))
  if activation == "gelu_quick":
    # Beyond these bounds, the sigmoid is 0 or 1 in f32. Without clipping, 0
    # times an infinite x would be NaN.
    x = jnp.clip(x, -60, 60)
    cdf = jax.nn.sigmoid(_QUICK * x)
    return cdf + _QUICK * x * cdf * (1 - cdf)
  if activation == "gelu_tanh":
    # Beyond these bounds, the sigmoid is 0 or 1 in f32. Without clipping, 0
    # times an infinite slope would be NaN.
    x = jnp.clip(x, -20, 20)
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    cdf = jax.nn.sigmoid(2 * inner)
    return cdf + 2 * x * cdf * (1 - cdf) * slope
  density = _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)
  return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF)) + x * density


def _check(*_, activation, **__) -> None:
  check_activation(activation)


@op(check=_check, mosaic="activation_input")
def activation_input(
  x: Array,
  *,
  activation: Activation,
  gated: bool,
  groups: Groups,
  output: Scaling = VALUES,
  factor: Array | None = None,
) -> tuple[Parts, Scales | None]:
  """Quantizes an activation function's input, and finds the output's scale.

  x has the shape [..., F], or [..., 2 F] if gate and up are concatenated.
  """
  halves = jnp.split(x, 2, axis=-1) if gated else [x]
  halves = [in_groups(half, groups.size) for half in halves]
  parts = tuple(map(groups.quantize, halves))
  y, n = _activated(parts, activation)
  return parts, output.find_joined_scale([_times(y, factor)], n)


@op(check=_check, mosaic="activation")
def activation_fwd(
  parts: Parts,
  *,
  activation: Activation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  factor: Array | None = None,
) -> Operand:
  """Computes f(x) or f(gate) * up as an operand in the row layout."""
  y, n = _activated(parts, activation)
  return output.quantize_joined([_times(y, factor)], n, scale, "rows")


@op(check=_check)
def activation_bwd(
  dy: Array, parts: Parts, *, activation: Activation
) -> tuple[Array, ...]:
  """Computes the gradient of x, or of gate and up, in f32."""
  gradients = _gradients(dy, parts, activation)
  return tuple(join_groups(x, dy.shape[-1]) for x in gradients)


@op(check=_check, mosaic="activation")
def activation_bwd_operands(
  dy: Array,
  parts: Parts,
  *,
  activation: Activation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  factor: Array | None = None,
  has_sums: bool = False,
) -> tuple[Operand, Operand, Array | None, Array | None]:
  """Computes the input's gradient and the output as operands of matmuls.

  If the gradient gets one E5M2 scale per tensor, the scale comes from
  `gradient_bounds`, because E5M2 has range to spare. Other scales come from the
  gradient itself.

  Returns:
    The gradient of x, or of gate and up concatenated, in the row and the column
      layout.
    The output, in the column layout.
    If `has_sums`, the gradient of a bias that was added to the input: the
      input's gradient before rounding, summed over rows in f32.
    If there is a `factor`, its gradient, f32 [..., 1].
  """
  n, dx = dy.shape[-1], _gradients(dy, parts, activation, factor)
  dfactor = None
  if factor is not None:
    product = dy.astype(jnp.float32) * activated(parts, activation=activation)
    dfactor = jnp.sum(product, axis=-1, keepdims=True)
  sums = None
  if has_sums:
    rows = [join_groups(x, n).reshape(-1, n) for x in dx]
    sums = jnp.concatenate([jnp.sum(x, axis=0) for x in rows])
  if type(gradient) is PerTensor and gradient.dtype == E5M2:
    found = gradient.find_scale(gradient_bounds(dy, parts, factor))
  else:
    found = gradient.find_joined_scale(dx, n)
  (dy, parts), found = read_again((dy, parts), found)
  if target() == "tpu":
    dx = _gradients(dy, parts, activation, factor)
  y, _ = _activated(parts, activation)
  return (
    gradient.quantize_joined(dx, n, found, "both"),
    output.quantize_joined([_times(y, factor)], n, scale, "columns"),
    sums,
    dfactor,
  )


def gradient_bounds(
  dy: Array, parts: Parts, factor: Array | None = None
) -> Array:
  """Bounds the input gradient's magnitude in each group, f32 [..., groups]."""
  # If x has one scale, a row is a group.
  size = parts[0].group_size or dy.shape[-1]
  magnitudes = [
    part.scale.astype(jnp.float32) * qmax(part.qvalue.dtype) for part in parts
  ]
  dy_amax = group_amax(in_groups(dy, size), size)
  largest = largest_gradient(dy_amax, magnitudes)
  if factor is None:
    return largest
  return jnp.where(factor == 0, 0.0, largest * jnp.abs(factor))


def largest_gradient(dy: Array, magnitudes: Sequence[Array]) -> Array:
  """Bounds the magnitude of the input's gradient.

  `dy` is the largest |dy|. `magnitudes` contains the largest |x|, or the
  largest |gate| and the largest |up|.
  """
  if len(magnitudes) == 1:
    return dy * _STEEPEST
  gate, up = magnitudes
  return dy * jnp.maximum(gate, up * _STEEPEST)


def activated(parts: Parts, *, activation: Activation) -> Array:
  """Computes f(x) or f(gate) * up in f32."""
  return join_groups(*_activated(parts, activation))


def _activated(parts: Parts, activation: Activation) -> tuple[Array, int]:
  """Computes `activated` as [..., groups, size]; also returns F."""
  x, *others = _values(parts)
  y = activation_values(x, activation=activation)
  return y * others[0] if others else y, parts[0].qvalue.shape[-1]


def _times(x: Array, factor: Array | None) -> Array:
  """Multiplies x [..., groups, size] by one factor per row, [..., 1]."""
  if factor is None:
    return x
  factor = factor[..., None]
  return jnp.where(factor == 0, 0.0, x * factor)


def _gradients(
  dy: Array,
  parts: Parts,
  activation: Activation,
  factor: Array | None = None,
) -> tuple[Array, ...]:
  """Computes `activation_bwd` as [..., groups, size], times `factor`."""
  x, *others = _values(parts)
  dy = split_groups(in_groups(dy, x.shape[-1]), x.shape[-1])
  dy = dy.astype(jnp.float32)
  slope = activation_derivative(x, activation=activation)
  if not others:
    return (_times(dy * slope, factor),)
  (up,) = others
  dgate = dy * up * slope
  dup = dy * activation_values(x, activation=activation)
  return _times(dgate, factor), _times(dup, factor)


def _values(parts: Parts) -> list[Array]:
  """Dequantizes all parts to f32 [..., groups, group_size]."""
  return [codes_in_groups(part).dequantize_groups() for part in parts]
