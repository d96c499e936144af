# SPDX-License-Identifier: Apache-2.0
"""Quantization in plain jnp that compiles to the FP8 cast instruction of GPUs.

`formats.saturating_cast` rounds to the format's grid in f32 before it casts,
since XLA may split a cast or drop it. For E4M3, XLA does neither if the fusion
that computes the codes also writes them to memory. The whole cast is then one
instruction, `cvt.rn.satfinite.e4m3x2.f32`. Rounding first would take 12 of 24
instructions per value, and keep the fusion far below memory bandwidth.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, qmax
from coat_jax.ops.capability import FP8, why_not_before
from coat_jax.ops.dispatch import kernel


def _why_not(dtype, **_) -> str | None:
  if dtype == E4M3:
    return why_not_before(FP8, "a cast to E4M3 in one instruction")
  return (
    "only a cast to float8_e4m3fn is one instruction, others may go through "
    f"f16, got {jnp.dtype(dtype).name}"
  )


@kernel(_why_not)
def quantize_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """`ops.quantize_rows`."""
  values = x.astype(jnp.float32) / scale
  return jnp.clip(values, -qmax(dtype), qmax(dtype)).astype(dtype)
