# SPDX-License-Identifier: Apache-2.0
"""The two FP8 formats and their limits.

E4M3 (4 exponent bits, 3 mantissa bits, no infinity) holds values and weights;
E5M2 (more range, less precision) holds gradients. Two traps of a plain cast are
avoided by rounding to the format's grid in f32 first, which makes the cast
exact; every cast in this package goes through `saturating_cast`.
  * A JAX cast does not saturate: 465 becomes NaN in E4M3, 61440 inf in E5M2.
  * On a GPU XLA drops pairs of conversions f32 -> FP8 -> f32 inside a jitted
    function ("excess precision"), and may go through f16, rounding twice. What
    is computed with would then not be what is remembered.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2


def qmax(dtype: DTypeLike) -> float:
  """Largest finite value: 448 for E4M3, 57344 for E5M2."""
  return float(jnp.finfo(dtype).max)


def smallest_subnormal(dtype: DTypeLike) -> float:
  """Smallest positive value: 2^-9 for E4M3, 2^-16 for E5M2."""
  return float(jnp.finfo(dtype).smallest_subnormal)


def saturating_cast(x: Float[Array, "*s"], dtype: DTypeLike) -> Array:
  """Casts to an FP8 format, round to nearest even, clipping to ±qmax first.

  Args:
    x: Float array of any shape. NaN stays NaN; infinities become ±qmax.
    dtype: E4M3 or E5M2.

  Returns:
    Array of the same shape in `dtype`.
  """
  x = jnp.clip(x.astype(jnp.float32), -qmax(dtype), qmax(dtype))
  drop = _dropped_bits(dtype)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  # Half a step less one, plus one where the kept part is odd: ties to even.
  half = jnp.uint32((1 << (drop - 1)) - 1) + ((bits >> drop) & jnp.uint32(1))
  normal = _truncated(bits + half, drop)
  step = smallest_subnormal(dtype)
  subnormal = jnp.round(x * (1 / step)) * step
  rounded = jnp.where(jnp.abs(x) < _smallest_normal(dtype), subnormal, normal)
  return jnp.where(jnp.isnan(x), x, rounded).astype(dtype)


def neighbours(x: Float[Array, "*s"], dtype: DTypeLike) -> tuple[Array, Array]:
  """The values of a format around x: the largest not above it, and the next.

  Args:
    x: f32 of any shape, 0 <= x <= qmax. NaN gives NaN twice.
    dtype: E4M3 or E5M2.

  Returns:
    lower and upper, f32, both exact in `dtype`; both qmax for qmax.
  """
  drop, step = _dropped_bits(dtype), smallest_subnormal(dtype)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  is_normal = x >= _smallest_normal(dtype)
  subnormal = jnp.floor(x * (1 / step)) * step
  lower = jnp.where(is_normal, _truncated(bits, drop), subnormal)
  above = _truncated(bits + jnp.uint32(1 << drop), drop)
  upper = jnp.where(is_normal, above, subnormal + step)
  upper = jnp.minimum(upper, qmax(dtype))
  is_nan = jnp.isnan(x)
  return jnp.where(is_nan, x, lower), jnp.where(is_nan, x, upper)


def _smallest_normal(dtype: DTypeLike) -> float:
  return float(jnp.finfo(dtype).smallest_normal)


def _dropped_bits(dtype: DTypeLike) -> int:
  """Mantissa bits that f32 has and the format has not."""
  return 23 - jnp.finfo(dtype).nmant


def _truncated(bits: Array, drop: int) -> Array:
  """The f32 of these bits without the lowest `drop` of them."""
  kept = bits & jnp.uint32(0xFFFFFFFF >> drop << drop)
  return jax.lax.bitcast_convert_type(kept, jnp.float32)
