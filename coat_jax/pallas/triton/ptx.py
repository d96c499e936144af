# SPDX-License-Identifier: Apache-2.0
"""Exponentials of f32 tiles in fewer instructions than Pallas can express.

The interpreter cannot run PTX: with `interpret` the functions use their jnp
version, which is also their definition.
"""

import struct

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

_LOG2_E = 1.4426950408889634


def exp2(x: Array, scale: float, shift: Array, *, interpret: bool) -> Array:
  """Returns 2^(x * scale - shift), on a GPU to 2 ulp, and 0 below 2^-126.

  x is an f32 tile; `shift` broadcasts to it.
  """
  if interpret:
    return jnp.exp2(x * scale - shift)
  return _inline(
    "{ .reg .f32 t; neg.f32 t, $2; "
    f"fma.rn.f32 t, $1, {_hex(scale)}, t; ex2.approx.ftz.f32 $0, t; }}",
    x,
    jnp.broadcast_to(shift, x.shape),
  )


def tanh(x: Array, scale: float, *, interpret: bool) -> Array:
  """Returns tanh(x * scale), on a GPU off by up to 2^-22; ±1 is exact.

  It is computed as 1 - 2 / (1 + exp(2 x)): `tanh.approx` is off by 2^-11 of its
  value, which with a cap of 50 is 0.02 of a score.
  """
  if interpret:
    return jnp.tanh(x * scale)
  return _inline(
    f"{{ .reg .f32 e; mul.f32 e, $1, {_hex(2 * _LOG2_E * scale)}; "
    f"ex2.approx.ftz.f32 e, e; add.f32 e, e, {_hex(1.0)}; "
    f"rcp.approx.ftz.f32 e, e; fma.rn.f32 $0, e, {_hex(-2.0)}, {_hex(1.0)}; }}",
    x,
  )


def _inline(code: str, *args: Array) -> Array:
  """Emits PTX that makes one f32 ($0) from one of each arg ($1, ...)."""
  [result] = plt.elementwise_inline_asm(
    code,
    args=args,
    constraints=",".join(["=f"] + ["f"] * len(args)),
    pack=1,
    result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
  )
  return result


def _hex(x: float) -> str:
  """Formats an f32 as PTX writes it."""
  return f"0f{struct.pack('>f', x).hex().upper()}"
