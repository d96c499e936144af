# SPDX-License-Identifier: Apache-2.0
"""Activation functions on tiles in registers, each as x times a share.

silu        x s,  s = sigmoid(x);  derivative s (1 + x (1 - s))
gelu_tanh   x s,  s = sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3);
            derivative s + 2 x s (1 - s) du/dx.  1 + tanh(u) = 2 s
gelu_quick  x s,  s = sigmoid(1.702 x);  derivative s + 1.702 x s (1 - s)
"""

from typing import Literal

from jax import Array

from coat_jax.pallas.triton import ptx

Function = Literal["silu", "gelu_tanh", "gelu_quick"]

_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715
_QUICK = 1.702


def share(x: Array, function: Function, interpret: bool) -> Array:
  """Returns f(x) / x."""
  if function == "silu":
    return ptx.sigmoid(x, interpret=interpret)
  if function == "gelu_quick":
    return ptx.sigmoid(_QUICK * x, interpret=interpret)
  inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
  return ptx.sigmoid(2 * inner, interpret=interpret)


def gelu_share_and_derivative(
  x: Array, function: Function, interpret: bool
) -> tuple[Array, Array]:
  """Returns f(x) / x and f'(x) of a GELU."""
  # Beyond the limit s is 0 or 1; 0 times an overflowing slope would be NaN.
  limit = 60.0 if function == "gelu_quick" else 20.0
  near = ptx.clip(x, limit, interpret=interpret)
  s = share(near, function, interpret)
  if function == "gelu_quick":
    return s, s + _QUICK * near * s * (1 - s)
  slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * near * near)
  return s, s + 2 * near * s * (1 - s) * slope


def value_and_derivative(
  x: Array, function: Function, interpret: bool
) -> tuple[Array, Array]:
  """Returns f(x) and f'(x)."""
  if function == "silu":
    s = share(x, function, interpret)
    return x * s, s * (1 + x * (1 - s))
  s, derivative = gelu_share_and_derivative(x, function, interpret)
  return x * s, derivative
