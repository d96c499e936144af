# SPDX-License-Identifier: Apache-2.0
"""The two FP8 formats and their limits.

E4M3 (4 exponent bits, 3 mantissa bits, no infinity) holds values and weights;
E5M2 (more range, less precision) holds gradients. A JAX cast does not saturate:
465 becomes NaN in E4M3 and 61440 infinity in E5M2, so every cast in this
package goes through `saturating_cast`.
"""

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


def saturating_cast(x: Float[Array, "*s"], dtype: DTypeLike):
  """Casts to an FP8 format, round to nearest even, clipping to ±qmax first.

  Args:
    x: Float array of any shape. NaN stays NaN; infinities become ±qmax.
    dtype: E4M3 or E5M2.

  Returns:
    Array of the same shape in `dtype`.
  """
  limit = qmax(dtype)
  return jnp.clip(x, -limit, limit).astype(dtype)
