# SPDX-License-Identifier: Apache-2.0
"""Activation functions on tiles in registers, and kernels that use them.

Each function is x times a share:

silu        x s,  s = sigmoid(x);  derivative s (1 + x (1 - s))
gelu_tanh   x s,  s = sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3);
            derivative s + 2 x s (1 - s) du/dx.  1 + tanh(u) = 2 s
gelu_quick  x s,  s = sigmoid(1.702 x);  derivative s + 1.702 x s (1 - s)
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.formats import E4M3
from coat_jax.ops.types import Activation
from coat_jax.pallas.triton import ptx, tiles
from coat_jax.pallas.triton.matrix import Matrix

Function = Activation | Literal["gelu_quick"]

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


# --- Kernels of one input, or of a gate and up -------------------------------


def _product(parts: list[Array], function: Function, interpret: bool) -> Array:
  """Returns f(x), or f(gate) up."""
  x, *others = parts
  y = x * share(x, function, interpret)
  for other in others:
    y = y * other
  return y


def input_kernel(whole: Matrix, x_ref, *refs, function: Function):
  """Quantizes x [rows, columns], or gate and up [rows, 2, columns]."""
  *refs, bits_ref = refs
  halves = [x_ref]
  if len(x_ref.shape) == 3:
    halves = [x_ref.at[:, jnp.int32(i)] for i in range(2)]
  parts = [whole.load(half) for half in halves]
  parts = [
    whole.store_groups(*refs[2 * i : 2 * i + 2], part)
    for i, part in enumerate(parts)
  ]
  y = _product(parts, function, whole.interpret)
  tiles.store_scalar(bits_ref, tiles.amax_bits(y))


def fwd_kernel(whole: Matrix, *refs, function: Function):
  """Reads codes and scales of x, or of gate and up, and writes an operand."""
  *refs, scale_ref, rows_ref, columns_ref = refs
  pairs = zip(refs[::2], refs[1::2], strict=True)
  parts = [whole.load_groups(*pair) for pair in pairs]
  y = _product(parts, function, whole.interpret)
  codes = whole.quantize(y, scale_ref, E4M3)
  whole.store_operand(rows_ref, columns_ref, codes)
