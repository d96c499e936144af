# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on f32 tiles in fewer instructions than Pallas can express.

An elementwise kernel can spend about 30 instructions per value before they,
rather than memory, limit its speed. Written in Pallas, a sigmoid takes 18, and
dividing a value by its scale and clipping it takes 11; here each takes 4. The
interpreter cannot run PTX: with `interpret` the functions use their jnp
version, which is also their definition.
"""

import struct

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax
from coat_jax.ops.capability import is_before
from coat_jax.pallas.triton import tiles

_LOG2_E = 1.4426950408889634


def quantize_with_scale(
  x: Array, scale: Array, *, dtype: DTypeLike, interpret: bool
) -> Array:
  """Quantizes f32 with one scale []: rne(clip(x / scale, ±qmax)), NaN kept.

  On a GPU the quotient is correctly rounded: we multiply by the reciprocal and
  then correct by the remainder. Before the correction the quotient is clipped
  to ±2 qmax, so that it never computes inf - inf; the hardware's cast saturates
  the rest.
  """
  if interpret:
    return tiles.saturating_cast(x / scale, dtype)
  # An infinite scale gives zeros and NaN: we compute 0 * x, never inf * 0.
  divisor = jnp.where(scale == jnp.inf, jnp.float32(0), scale)
  quotient = _inline(
    "{ .reg .f32 q, r; mul.f32 q, $1, $3; "
    f"{_clip('q', 'q', 2 * qmax(dtype))} "
    "neg.f32 r, q; fma.rn.f32 r, r, $2, $1; fma.rn.f32 $0, r, $3, q; }",
    x,
    jnp.broadcast_to(divisor, x.shape),
    jnp.broadcast_to(1 / scale, x.shape),
  )
  return quotient.astype(dtype)


def sigmoid(x: Array, *, interpret: bool) -> Array:
  """Returns 1 / (1 + exp(-x)), on a GPU to a few ulp; 0 and 1 are exact."""
  if interpret:
    return 1 / (1 + jnp.exp(-x))
  return _inline(
    f"{{ .reg .f32 e; mul.f32 e, $1, {_hex(-_LOG2_E)}; "
    f"ex2.approx.ftz.f32 e, e; add.f32 e, e, {_hex(1.0)}; "
    "rcp.approx.ftz.f32 $0, e; }",
    x,
  )


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


def clip(x: Array, limit: float, *, interpret: bool) -> Array:
  """Clips x to ±limit and keeps NaN."""
  if interpret:
    return jnp.clip(x, -limit, limit)
  return _inline(_clip("$0", "$1", limit), x)


def _clip(to: str, x: str, limit: float) -> str:
  """Returns PTX that clips x to ±limit; it takes two instructions on an A100.

  Both forms keep NaN and the sign of zero.
  """
  if is_before(8.6):
    return (
      f"min.NaN.f32 {to}, {x}, {_hex(limit)}; "
      f"max.NaN.f32 {to}, {to}, {_hex(-limit)};"
    )
  return f"min.NaN.xorsign.abs.f32 {to}, {x}, {_hex(limit)};"


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
