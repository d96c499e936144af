# SPDX-License-Identifier: Apache-2.0
"""Values and derivatives of activation functions, in f32."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import check_choice, check_numeric
from coat_jax.ops.types import Activation, Approximation


def _in_f32(x: Any) -> Array:
  """Converts an array to f32; raises a TypeError if it is not numeric."""
  check_numeric("activation", "x", x, "pass its input")
  return x.astype(jnp.float32)


def silu_values(x: Array) -> Array:
  """Computes x sigmoid(x) in f32."""
  x = _in_f32(x)
  return x * jax.nn.sigmoid(x)


def silu_derivative(x: Array) -> Array:
  """Computes sigmoid(x) (1 + x (1 - sigmoid(x))) in f32."""
  x = _in_f32(x)
  sigmoid = jax.nn.sigmoid(x)
  return sigmoid * (1 + x * (1 - sigmoid))


_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715
_QUICK = 1.702


def gelu_values(x: Array, *, approximate: Approximation) -> Array:
  """Computes x Phi(x) in f32, with the `Approximation` of Phi.

  sigmoid(2 u) replaces (1 + tanh(u)) / 2, which cancels for tanh(u) near -1.
  """
  x = _in_f32(x)
  check_approximation(approximate)
  if approximate == "sigmoid":
    return x * jax.nn.sigmoid(_QUICK * x)
  if approximate:
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    return x * jax.nn.sigmoid(2 * inner)
  return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


def gelu_derivative(x: Array, *, approximate: Approximation) -> Array:
  """Computes d gelu / dx in f32."""
  x = _in_f32(x)
  check_approximation(approximate)
  if approximate == "sigmoid":
    # Clipped for the same reason as below; sigmoid(-102) is not subnormal.
    x = jnp.clip(x, -60, 60)
    cdf = jax.nn.sigmoid(_QUICK * x)
    return cdf + _QUICK * x * cdf * (1 - cdf)
  if approximate:
    # Beyond 20 sigmoid is 0 or 1; 0 times an overflowing slope would be NaN.
    x = jnp.clip(x, -20, 20)
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    cdf = jax.nn.sigmoid(2 * inner)
    return cdf + 2 * x * cdf * (1 - cdf) * slope
  density = _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)
  return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF)) + x * density


def check_approximation(approximate: Any) -> None:
  """Raises a ValueError if this is not an `Approximation`."""
  if approximate not in (True, False, "sigmoid"):
    raise ValueError(
      'gelu: approximate must be True, False or "sigmoid", got '
      f"{approximate!r}; True is the tanh formula, False erf"
    )


def check_activation(activation: Any) -> None:
  """Raises a ValueError if this is not an `Activation`."""
  check_choice("gated", "activation", activation, get_args(Activation))


def activation_values(x: Array, *, activation: Activation) -> Array:
  """Computes the activation function of x in f32."""
  check_activation(activation)
  if activation == "silu":
    return silu_values(x)
  return gelu_values(x, approximate=activation == "gelu_tanh")


def activation_derivative(x: Array, *, activation: Activation) -> Array:
  """Computes the activation function's derivative at x in f32."""
  check_activation(activation)
  if activation == "silu":
    return silu_derivative(x)
  return gelu_derivative(x, approximate=activation == "gelu_tanh")
