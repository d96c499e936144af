# SPDX-License-Identifier: Apache-2.0
"""Float64 versions of the moment codecs, and error bounds derived from them."""

import numpy as np

from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8, ScaledFP8
from coat_jax.codecs.group import Encoded
from coat_jax.codecs.integers import LogUniform
from coat_jax.numerics.formats import E5M2
from tests import oracles

# Maps names to functions of (group_size, rounding) that build a group codec.
# Errors of these codecs are relative; test_int8 tests the linear codec.
GROUP_CODECS = {
  "fp8": ScaledFP8,
  "coat": ExpandedFP8,
  "coat_e5m2": lambda group_size, rounding: ExpandedFP8(
    group_size, rounding, E5M2
  ),
  "coat_e8m0": BoundedFP8,
  "log8_signed": lambda group_size, rounding: LogUniform(
    group_size, rounding, signed=True
  ),
  "log8_unsigned": lambda group_size, rounding: LogUniform(
    group_size, rounding, signed=False
  ),
}


def is_unsigned(codec) -> bool:
  return isinstance(codec, LogUniform) and not codec.signed


def signed_like(codec, x: np.ndarray) -> np.ndarray:
  """Returns x with alternating signs, or x if the codec stores no signs."""
  return x if is_unsigned(codec) else x * (-1.0) ** np.arange(x.shape[-1])


def bits(codes) -> np.ndarray:
  return np.asarray(codes).view(np.uint8)


def codes_apart(codec, a, b) -> np.ndarray:
  """Returns how many codes apart two codes are, ordered by value."""
  if isinstance(codec, LogUniform):
    return np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int))
  return oracles.codes_apart(bits(a), bits(b))


def _grouped(x, group_size, fill=0.0):
  """Pads [..., n] and reshapes it to [..., groups, group_size]."""
  missing = -x.shape[-1] % group_size
  x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
  return x.reshape(*x.shape[:-1], -1, group_size)


def _joined(x, n):
  return x.reshape(*x.shape[:-2], -1)[..., :n]


def _code(codec, amax, range_):
  """Returns the float64 oracle of a code, given the stored statistics."""
  amax, range_ = np.asarray(amax), np.asarray(range_)
  if isinstance(codec, LogUniform):
    return oracles.LogCode(
      amax.astype(int), range_.astype(int), 127 if codec.signed else 255
    )
  if isinstance(codec, BoundedFP8):
    octaves = np.maximum(amax.astype(int) - range_.astype(int), 1)
    power = np.log2(oracles.QMAX[codec.dtype] ** 2 / 2) / octaves
    bound = 2.0 ** (amax.astype(float) - 127)
    return oracles.Expansion(bound, power, codec.dtype)
  power = range_ / 16 if isinstance(codec, ExpandedFP8) else np.ones(amax.shape)
  return oracles.Expansion(amax.astype(float), power, codec.dtype)


def statistics(codec, magnitude):
  """Returns amax and range of groups [..., group_size], as stored."""
  if isinstance(codec, (BoundedFP8, LogUniform)):
    upper, lower = oracles.exponent_bounds(magnitude)
    return upper.astype(np.uint8), lower.astype(np.uint8)
  amax = magnitude.max(-1).astype(np.float32)
  if isinstance(codec, ExpandedFP8):
    return amax, oracles.coat_power(magnitude, codec.dtype)
  return amax, np.uint8(0)


def encode(codec, x: np.ndarray, noise) -> Encoded:
  """Encodes x in float64 to FP8 bits, or to integers for `LogUniform`."""
  magnitude = oracles.magnitudes(_grouped(x, codec.group_size))
  amax, range_ = statistics(codec, magnitude)
  code = _code(codec, amax, range_)
  if noise is None:
    codes = code.nearest(magnitude)
  else:
    noise = _grouped(np.asarray(noise, np.float64), codec.group_size, 0.5)
    codes, _, _ = oracles.stochastic(code, magnitude, noise)
  codes = _joined(codes, x.shape[-1])
  if isinstance(codec, LogUniform):
    if codec.signed:
      codes = np.where(x < 0, -codes, codes)
  else:
    codes = codes.astype(np.uint8) | np.where(x < 0, 0x80, 0).astype(np.uint8)
  return Encoded(codes, amax, range_)


def decode(codec, encoded: Encoded) -> np.ndarray:
  """Decodes an `Encoded` that coat_jax returned, in float64."""
  code = _code(codec, encoded.amax, encoded.range)
  codes = np.asarray(encoded.codes)
  if isinstance(codec, LogUniform):
    sign, magnitude = np.sign(codes.astype(int)), np.abs(codes.astype(int))
  else:
    stored = bits(codes)
    sign, magnitude = np.where(stored & 0x80, -1, 1), stored & 0x7F
  values = code.decode(_grouped(magnitude, codec.group_size, 0))
  return sign * _joined(values, codes.shape[-1])


def gap(codec, x: np.ndarray) -> np.ndarray:
  """Returns the distance between the two decoded values around each value."""
  magnitude = oracles.magnitudes(_grouped(x, codec.group_size))
  code = _code(codec, *statistics(codec, magnitude))
  _, below, above = oracles.stochastic(code, magnitude, 0.5)
  return _joined(above - below, x.shape[-1])


def error_bound(codec, x: np.ndarray, encoded: Encoded) -> np.ndarray:
  """Bounds |decode(encode(x)) - x|, given the stored statistics.

  FP8 codecs round the image of x, which moves by at most half a step, or by a
  whole step if rounding is stochastic. Decoding turns this into an error of the
  value. In the logarithmic codec, a step multiplies the value by a factor. f32
  arithmetic adds a relative error of 2^-15. Values above the largest code's
  value decode to that value. Subnormal magnitudes, and those below 2^-125 of
  that value, may become zero or the smallest code.
  """
  magnitude = oracles.magnitudes(_grouped(x, codec.group_size))
  code = _code(codec, encoded.amax, encoded.range)
  steps = 1 if codec.rounding == "stochastic" else 0.5
  if isinstance(codec, LogUniform):
    bound = magnitude * (2.0 ** (steps * code.step) - 1)
    top = code.decode(np.full(magnitude.shape, code.top))
    lowest = code.decode(np.ones(magnitude.shape))
    floor = np.where(magnitude < top * 2.0**-125, magnitude + lowest, 0)
  else:
    y = code.image(magnitude)
    # `fp8_error_bound` returns half a step.
    step = 2 * steps * oracles.fp8_error_bound(y, codec.dtype)
    qmax = oracles.QMAX[codec.dtype]
    up = (np.minimum(y + step, qmax) / qmax) ** (1 / code.k) * code.bound
    down = (np.maximum(y - step, 0) / qmax) ** (1 / code.k) * code.bound
    bound = np.maximum(up - magnitude, magnitude - down)
    top = code.bound
    zero = magnitude < top * 2.0**-125
    if isinstance(codec, ScaledFP8):
      zero |= top < qmax * oracles.SMALLEST_NORMAL
    floor = np.where(zero, magnitude, 0)
  bound = np.maximum(bound, magnitude - top)
  bound = bound + floor + magnitude * 2.0**-15 + 2 * oracles.SMALLEST_NORMAL
  return _joined(bound, x.shape[-1])


def rank_one_tiles(v, row, tiles=1):
  """Returns v [..., n] with each tile replaced by one of rank one.

  Each tile keeps the means of its rows and of its columns. `row` is the axis of
  rows, along which there are `tiles` tiles.
  """
  v = np.moveaxis(np.asarray(v, float), row, -2)
  out = np.empty_like(v)
  height = v.shape[-2] // tiles
  for i in range(0, v.shape[-2], height):
    for j in range(0, v.shape[-1], 128):
      tile = v[..., i : i + height, j : j + 128]
      rows, columns = (tile.mean(axis, keepdims=True) for axis in (-1, -2))
      whole = tile.mean((-1, -2), keepdims=True)
      out[..., i : i + height, j : j + 128] = rows * columns / whole
  return np.moveaxis(out, -2, row)
