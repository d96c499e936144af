# SPDX-License-Identifier: Apache-2.0
"""Values and derivatives of activation functions, in f32.

We write (1 + tanh(u)) / 2 as sigmoid(2 u), because 1 + tanh(u) loses its digits
to cancellation if tanh(u) is near -1.
"""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import check_choice, check_numeric
from coat_jax.ops.types import Activation

_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715
_QUICK = 1.702


def check_activation(activation: Any) -> None:
  """Raises a ValueError if this is not an `Activation`."""
  remedy = "gelu_tanh uses the tanh formula, gelu uses erf"
  choices = get_args(Activation)
  check_choice("activation", "activation", activation, choices, remedy)


def _checked(x: Any, activation: Any) -> Array:
  """Checks the arguments; returns x in f32."""
  check_activation(activation)
  check_numeric("activation", "x", x, "pass the function's input")
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
    # Clip x for the same reason as below. sigmoid(-102) is not subnormal.
    x = jnp.clip(x, -60, 60)
    cdf = jax.nn.sigmoid(_QUICK * x)
    return cdf + _QUICK * x * cdf * (1 - cdf)
  if activation == "gelu_tanh":
    # Beyond 20, sigmoid is 0 or 1, so clipping changes nothing. Without it, 0
    # times an overflowing slope would be NaN.
    x = jnp.clip(x, -20, 20)
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    cdf = jax.nn.sigmoid(2 * inner)
    return cdf + 2 * x * cdf * (1 - cdf) * slope
  density = _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)
  return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF)) + x * density
