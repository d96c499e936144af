# SPDX-License-Identifier: Apache-2.0
"""Plain jnp for what GPUs with FP8 have an instruction of.

`formats.saturating_cast` rounds to the format's grid in f32 before it casts,
since XLA may split a cast or drop it. Of E4M3 it does neither where codes leave
the pass that made them: `cvt.rn.satfinite.e4m3x2.f32` is then the whole cast,
and what rounds before it is 12 of 24 instructions a value, in a pass that they
keep far from the memory's speed.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3, qmax
from coat_jax.ops.dispatch import supported
from coat_jax.ops.types import Unsupported


def quantize_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """`ops.quantize_rows`."""
  if dtype != E4M3:
    raise Unsupported(
      "quantize_rows: a cast is one instruction in float8_e4m3fn, and may go "
      f"through f16 in others, got {jnp.dtype(dtype).name}"
    )
  supported()
  values = x.astype(jnp.float32) / scale
  return jnp.clip(values, -qmax(dtype), qmax(dtype)).astype(dtype)
