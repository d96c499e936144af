# SPDX-License-Identifier: Apache-2.0
"""Codecs that store an optimizer's moments between steps.

A codec encodes f32 values as codes of the same shape, plus at most two
statistics per group of `group_size` values along the last axis. Decoding
returns f32 values. Each function below returns a `MomentCodec`, which contains
a codec for the first moment (signed) and a codec for the second moment (never
negative). Bytes are for both moments together, with groups of 128:

  codec      code                  statistics per group          bytes/param
  coat       E4M3 of a power of x  amax f32, power uint8         2.08
    second="factored"              v: means of rows and columns  1.09
  coat_e8m0  E4M3 of a power of x  two powers of two, uint8      2.03
  log8       uniform in log x      two powers of two, uint8      2.03
  fp8        E4M3 of x             amax f32                      2.06
  int8       linear in x           amax f32                      2.06
  bfloat16   x                     none                          4
  float32    x                     none                          8

Why a power: if a group spans a wider range than E4M3, small values become 0; if
it spans a narrower range, many codes are never used. With
k = log(range of E4M3) / log(range of the group), x^k spans exactly the range of
E4M3 (dynamic range expansion, arXiv:2410.19313, section 4). Decoding computes
x = sign(q) (|q|/qmax)^(1/k) amax from the code q, where qmax is the largest
E4M3 value. In `coat`, k is a multiple of 1/16: an exact k would change at every
step, so all codes would be rounded again and the moments would drift.

Why stochastic rounding: with b2 = 0.999, a step changes the second moment by
about 0.1 %, but the next E4M3 value is 6 to 12.5 % away. Rounding to nearest
would leave the moment unchanged. We round up with probability
(x - lower) / (upper - lower), where lower and upper are the decoded values of
the codes next to x. So E[decode(encode(x))] = x.

If a group contains a NaN or an infinity, the whole group decodes to NaN; other
groups are unaffected. Codecs with groups treat magnitudes below 2^-126 as zero.

To add your own codec, define a `GroupCodec` for each moment, and a function
that returns a `MomentCodec`. Each argument of the function needs a default.
"""

from typing import Literal

from coat_jax.codecs.factored import Factored
from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8, ScaledFP8
from coat_jax.codecs.group import Encoded as Encoded
from coat_jax.codecs.group import GroupCodec as GroupCodec
from coat_jax.codecs.group import Plain, Rounding
from coat_jax.codecs.integers import LinearInt8, LogUniform
from coat_jax.codecs.registry import MomentCodec as MomentCodec
from coat_jax.codecs.registry import build as build
from coat_jax.codecs.registry import names as names
from coat_jax.codecs.registry import options as options
from coat_jax.codecs.registry import register as register
from coat_jax.codecs.registry import variants as variants
from coat_jax.numerics.checks import check_choice
from coat_jax.numerics.formats import E4M3, E5M2


@register
def coat(
  group_size: int = 128,
  rounding: Rounding = "stochastic",
  second: Literal["e4m3", "e5m2", "factored"] = "e4m3",
) -> MomentCodec:
  """FP8 with dynamic range expansion, the method of the COAT paper.

  Args:
    group_size: number of values along the last axis that share statistics.
    rounding: "stochastic", or "nearest" as in the authors' code. With
      "nearest", second moments freeze if b2 is 0.99 or more.
    second: format of the second moment; the first moment is always in E4M3.
      "factored" stores only means of rows and columns, as Adafactor does, but
      separately for each tile of 128 columns and 192 or more rows.

  Returns:
    A codec that stores 2 + 10 / group_size bytes per parameter. With
    second="factored", it stores about 1.05 + 5 / group_size bytes.

  Raises:
    TypeError, ValueError: an argument has the wrong type or value.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.coat(group_size=64))

  Source: arXiv:2410.19313, section 4; docs/deviations.md 4 to 8.
  """
  formats = {"e4m3": E4M3, "e5m2": E5M2}
  check_choice("coat", "second", second, (*formats, "factored"))
  nu = Factored()
  if second != "factored":
    nu = ExpandedFP8(group_size, rounding, formats[second])
  return MomentCodec(name="coat", mu=ExpandedFP8(group_size, rounding), nu=nu)


@register
def coat_e8m0(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """`coat` with power-of-two bounds: 2 + 4 / group_size bytes per parameter.

  See `coat` for the arguments. Keep the rounding stochastic: with "nearest",
  second moments stay 6 times (b2 = 0.95) or 180 times (b2 = 0.99) too large
  after gradients shrink.
  """
  group = BoundedFP8(group_size, rounding)
  return MomentCodec(name="coat_e8m0", mu=group, nu=group)


@register
def log8(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """Codes uniform in log x: 2 + 4 / group_size bytes per parameter.

  See `coat` for the arguments. "nearest" raises a ValueError: with b2 = 0.99,
  second moments would stay 200 times too large after gradients shrink, because
  a step changes them by less than the distance to the next code.
  """
  if rounding == "nearest":
    raise ValueError(
      "log8: rounding must be 'stochastic', got 'nearest', which freezes "
      "second moments; use coat(rounding='nearest') for parity runs"
    )
  return MomentCodec(
    name="log8",
    mu=LogUniform(group_size, rounding, signed=True),
    nu=LogUniform(group_size, rounding, signed=False),
  )


@register
def fp8(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """E4M3 without expansion: 2 + 8 / group_size bytes per parameter.

  Use this codec only as a baseline. See `coat` for the arguments.
  """
  group = ScaledFP8(group_size, rounding)
  return MomentCodec(name="fp8", mu=group, nu=group)


@register
def int8(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """INT8, linear in x: 2 + 8 / group_size bytes per parameter.

  Use this codec only as a baseline. If a second moment is less than 1/255 of
  the largest one in its group, it may become 0. Then a small gradient in the
  next step leads to a huge update. See `coat` for the arguments.
  """
  return MomentCodec(
    name="int8",
    mu=LinearInt8(group_size, rounding, signed=True),
    nu=LinearInt8(group_size, rounding, signed=False),
  )


@register
def bfloat16() -> MomentCodec:
  """Rounds both moments to the nearest bfloat16: 4 bytes per parameter."""
  return MomentCodec(
    name="bfloat16", mu=Plain("bfloat16"), nu=Plain("bfloat16")
  )


@register
def float32() -> MomentCodec:
  """Stores both moments in f32, like ordinary Adam: 8 bytes per parameter."""
  return MomentCodec(name="float32", mu=Plain("float32"), nu=Plain("float32"))
