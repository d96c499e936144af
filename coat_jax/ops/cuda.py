# SPDX-License-Identifier: Apache-2.0
"""Quantization in plain jnp that compiles to the FP8 cast instruction of GPUs.

`formats.saturating_cast` rounds to the format's grid in f32 before it casts,
since XLA may split a cast or drop it. For E4M3, XLA does neither if the codes
leave the pass that made them: `cvt.rn.satfinite.e4m3x2.f32` is then the whole
cast. The rounding before it would take 12 of 24 instructions per value and keep
the pass far below memory bandwidth.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, qmax
from coat_jax.ops.dispatch import kernel


def _why_not(dtype, **_) -> str | None:
  if dtype == E4M3:
    return None
  return (
    "a cast is one instruction in float8_e4m3fn, and may go through f16 in "
    f"others, got {jnp.dtype(dtype).name}"
  )


@kernel(_why_not)
def quantize_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """`ops.quantize_rows`."""
  values = x.astype(jnp.float32) / scale
  return jnp.clip(values, -qmax(dtype), qmax(dtype)).astype(dtype)
