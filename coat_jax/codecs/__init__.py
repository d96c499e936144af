# SPDX-License-Identifier: Apache-2.0
"""How an optimizer's moments are stored between steps: one small interface.

A codec turns f32 values into codes of the same shape and at most two statistics
per group of `group_size` values along the last axis, and back. The functions
below return a `MomentCodec`: one group codec for the first moment (signed) and
one for the second (never negative). They are frozen and carry every static
choice, so that an ablation is one argument and `jit` and
`optax.inject_hyperparams` see only numbers elsewhere.

  codec      code                  statistics per group          B/param
  coat       E4M3 of a power of x  amax f32, power uint8         2.08
  coat_e8m0  E4M3 of a power of x  two exponents of 2, uint8     2.03
  log8       uniform in log x      two exponents of 2, uint8     2.03
  fp8        E4M3 of x             amax f32                      2.06
  int8       linear in x           amax f32                      2.06
  bfloat16   x                     none                          4
  float32    x                     none                          8

Why a power: a group of second moments spans more than E4M3 can; x^k with
k = log(range of E4M3) / log(range of the group) spans it exactly (dynamic range
expansion, arXiv:2410.19313, section 4). x = sign(q) (|q|/qmax)^(1/k) amax needs
no more than amax and k. k is on a grid of sixteenths: an exact k would change
at every step, re-round every code and make the moments drift.

Why stochastic: with b2 = 0.999 a step moves v by about 0.1 %, an FP8 code by 6;
round to nearest then never moves v again. Rounding up with probability
(x - lower) / (upper - lower), taken between the *decoded* neighbours, keeps
E[decode(encode(x))] = x.

A group that holds a NaN or an infinity decodes to NaN as a whole and touches no
other group. Magnitudes below 2^-126 count as zero on every backend.

A codec of your own is one file: group codecs (`codecs.group`), and a function
that returns a `MomentCodec` and has a default for every argument. Pass its
result as `codec=`, or name the function as "package.module:function" where the
command line and the benchmarks ask for a codec; `register` gives it a name.
"""

from typing import Literal

from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8, ScaledFP8
from coat_jax.codecs.group import Encoded as Encoded
from coat_jax.codecs.group import GroupCodec as GroupCodec
from coat_jax.codecs.group import Plain, Rounding
from coat_jax.codecs.int8 import int8 as int8
from coat_jax.codecs.log8 import LogUniform
from coat_jax.codecs.registry import MomentCodec as MomentCodec
from coat_jax.codecs.registry import build as build
from coat_jax.codecs.registry import names as names
from coat_jax.codecs.registry import options as options
from coat_jax.codecs.registry import register as register
from coat_jax.codecs.registry import variants as variants
from coat_jax.formats import E4M3, E5M2


@register
def coat(
  group_size: int = 128,
  rounding: Rounding = "stochastic",
  second: Literal["e4m3", "e5m2"] = "e4m3",
) -> MomentCodec:
  """FP8 with dynamic range expansion, the method of the paper.

  Args:
    group_size: values along the last axis that share amax and power.
    rounding: "stochastic", or "nearest" as the reference rounds (second moments
      then freeze where b2 is 0.99 or more).
    second: format of the second moment; the first is always E4M3.

  Returns:
    A codec of 2 + 10 / group_size bytes a parameter.

  Raises:
    ValueError: an argument outside its values.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.coat(group_size=64))

  Source: arXiv:2410.19313, section 4; docs/deviations.md 3 to 6.
  """
  formats = {"e4m3": E4M3, "e5m2": E5M2}
  if second not in tuple(formats):
    raise ValueError(
      f"coat: second must be 'e4m3' or 'e5m2', got {second!r}; the first "
      "moment is always E4M3"
    )
  return MomentCodec(
    name="coat",
    mu=ExpandedFP8(group_size, rounding),
    nu=ExpandedFP8(group_size, rounding, formats[second]),
  )


@register
def coat_e8m0(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """`coat` with power-of-two bounds: 2 + 4 / group_size bytes a parameter.

  Keep it stochastic: to nearest, v ends up 6 times (b2 = 0.95) to 180 times
  (0.99) too large after gradients shrink.

  Args:
    group_size: values along the last axis that share both bounds.
    rounding: "stochastic" or "nearest".

  Returns:
    A codec of 2 + 4 / group_size bytes a parameter.

  Raises:
    ValueError: an argument outside its values.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.coat_e8m0())
  """
  group = BoundedFP8(group_size, rounding)
  return MomentCodec(name="coat_e8m0", mu=group, nu=group)


@register
def log8(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """Codes uniform in log x between power-of-two bounds, as small as coat_e8m0.

  Only with stochastic rounding: to nearest, v ends up 200 times too large after
  gradients shrink (b2 = 0.99), since a step in log x is wider than a step of v.

  Args:
    group_size: values along the last axis that share both bounds.
    rounding: "stochastic"; "nearest" is refused.

  Returns:
    A codec of 2 + 4 / group_size bytes a parameter.

  Raises:
    ValueError: an argument outside its values.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.log8())
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
  """E4M3 with one scale per group and no expansion: a baseline, not advice.

  Args:
    group_size: values along the last axis that share a scale.
    rounding: "stochastic" or "nearest".

  Returns:
    A codec of 2 + 8 / group_size bytes a parameter.

  Raises:
    ValueError: an argument outside its values.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.fp8())
  """
  group = ScaledFP8(group_size, rounding)
  return MomentCodec(name="fp8", mu=group, nu=group)


register(int8)


@register
def bfloat16() -> MomentCodec:
  """Both moments rounded to nearest bfloat16: a baseline, 4 B/param."""
  return MomentCodec(
    name="bfloat16", mu=Plain("bfloat16"), nu=Plain("bfloat16")
  )


@register
def float32() -> MomentCodec:
  """Moments as they are: Adam exactly, 8 bytes a parameter."""
  return MomentCodec(name="float32", mu=Plain("float32"), nu=Plain("float32"))
