# SPDX-License-Identifier: Apache-2.0
"""Computes activation functions and their derivatives in inline PTX.

Each activation function is x s, with s = sigmoid(u) = 1 / (1 + 2^(-u log2(e))):

  silu        u = x;  derivative s + s (x - x s)
  gelu_tanh   u = x (a + b x^2), a = 2 sqrt(2 / pi), b = 0.044715 a;
              derivative s + x (a + 3 b x^2) (s - s^2)
  gelu_quick  u = 1.702 x;  derivative s + 1.702 x (s - s^2)

The power and the reciprocal are computed by `ex2.approx` and `rcp.approx`,
which are off by a few ulp. We don't use `tanh.approx`, because its error of
2^-11 exceeds the sigmoid of very negative u. The interpreter cannot run PTX, so
with `interpret` this module calls `ops.activation`.
"""

import functools
from collections.abc import Callable

from jax import Array

from coat_jax.ops.activation import activation_derivative, activation_values
from coat_jax.ops.types import Activation
from coat_jax.pallas.mosaic import emit
from coat_jax.pallas.mosaic.emit import number
from coat_jax.pallas.mosaic.row_ptx import elementwise

_LOG2_E = 1.4426950408889634
_LINEAR = 2 * 0.7978845608028654  # 2 sqrt(2 / pi)
_CUBIC = 0.044715 * _LINEAR
_QUICK = 1.702
# To compute derivatives, x is clipped to ± these limits; beyond them, s is 0 or
# 1. Otherwise, 1.702 x or x^3 could be infinite, and 0 times infinity is NaN.
_LIMITS = {"gelu_tanh": 20.0, "gelu_quick": 60.0}


def values(x: Array, activation: Activation, layout, interpret: bool) -> Array:
  """Computes f(x)."""
  if interpret:
    return activation_values(x, activation=activation)
  return x * _share(x, activation, layout)


def values_and_slopes(
  x: Array, activation: Activation, layout, interpret: bool
) -> tuple[Array, Array]:
  """Computes f(x) and f'(x)."""
  if interpret:
    y = activation_values(x, activation=activation)
    return y, activation_derivative(x, activation=activation)
  near = x
  if activation in _LIMITS:
    limit = number(_LIMITS[activation])
    clip = f"min.NaN.xorsign.abs.f32 $0, $1, {limit};"
    near = elementwise(functools.partial(emit.f32, clip), x, layout=layout)
  share = _share(near, activation, layout)
  slope = elementwise(_SLOPES[activation], near, share, layout=layout)
  return x * share, slope


def _share(x: Array, activation: Activation, layout) -> Array:
  """Computes the sigmoid s = f(x) / x."""
  exponent = _EXPONENTS[activation]

  def share(x):
    sigmoid = (
      "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; "
      f"add.f32 e, e, {number(1.0)}; rcp.approx.ftz.f32 $0, e; }}"
    )
    return emit.f32(sigmoid, exponent(x))

  return elementwise(share, x, layout=layout)


def _times(factor: float) -> Callable:
  return functools.partial(emit.f32, f"mul.f32 $0, $1, {number(factor)};")


def _cubic(x, linear: float, cubic: float):
  """Emits x (linear + cubic x^2)."""
  # If two cubics of one x are emitted, the compiler computes x^2 only once.
  square = emit.f32("mul.f32 $0, $1, $1;", x)
  return emit.f32(
    f"{{ .reg .f32 c; fma.rn.f32 c, $1, {number(cubic)}, {number(linear)}; "
    "mul.f32 $0, c, $2; }",
    square,
    x,
  )


_EXPONENTS: dict[Activation, Callable] = {
  "silu": _times(-_LOG2_E),
  "gelu_quick": _times(-_LOG2_E * _QUICK),
  "gelu_tanh": functools.partial(
    _cubic, linear=-_LOG2_E * _LINEAR, cubic=-_LOG2_E * _CUBIC
  ),
}


def _silu_slope(x, share):
  return emit.f32(
    "{ .reg .f32 r; neg.f32 r, $2; fma.rn.f32 r, r, $1, $1; "
    "fma.rn.f32 $0, r, $2, $2; }",
    x,
    share,
  )


def _gelu_slope(inner: Callable, x, share):
  """Emits s + x u'(x) (s - s^2); `inner(x)` emits x u'(x)."""
  return emit.f32(
    "{ .reg .f32 r; neg.f32 r, $2; fma.rn.f32 r, r, $2, $2; "
    "fma.rn.f32 $0, r, $1, $2; }",
    inner(x),
    share,
  )


_SLOPES: dict[Activation, Callable] = {
  "silu": _silu_slope,
  "gelu_quick": functools.partial(_gelu_slope, _times(_QUICK)),
  "gelu_tanh": functools.partial(
    _gelu_slope, functools.partial(_cubic, linear=_LINEAR, cubic=3 * _CUBIC)
  ),
}
