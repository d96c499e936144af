# SPDX-License-Identifier: Apache-2.0
"""What the numerical core should compute, in NumPy, written from definitions.

Nothing here calls coat_jax or JAX. FP8 rounding looks codes up in the table of
the format's values; moment codecs are evaluated in float64.
"""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
QMAX = {E4M3: 448.0, E5M2: 57344.0}
SUBNORMAL_STEP = {E4M3: 2.0**-9, E5M2: 2.0**-16}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST_NORMAL = 2.0**-126  # of f32; below, magnitudes count as zero


def fp8_values(dtype) -> np.ndarray:
  """The finite values of codes 0, 1, 2, ..., ascending, float64."""
  values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
  return values[np.isfinite(values)]


def fp8_nearest(magnitude: np.ndarray, dtype) -> np.ndarray:
  """Codes of magnitudes, to nearest, ties to even, saturating: uint8."""
  values = fp8_values(dtype)
  y = np.minimum(np.asarray(magnitude, np.float64), values[-1])
  lower = np.clip(np.searchsorted(values, y, "right") - 1, 0, len(values) - 2)
  to_lower, to_upper = y - values[lower], values[lower + 1] - y
  odd = lower % 2 == 1
  up = (to_upper < to_lower) | ((to_upper == to_lower) & odd)
  return (lower + up).astype(np.uint8)


def fp8_cast(x: np.ndarray, dtype) -> np.ndarray:
  """Bits of a saturating cast of finite values, sign included: uint8."""
  codes = fp8_nearest(np.abs(x), dtype)
  return codes | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)


def codes_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """How many FP8 values are between two codes (bits), 0 where equal."""
  # Sign and magnitude to ordered integers; +0 and -0 are the same.
  a, b = (np.where(x & 0x80, -(x & 0x7F).astype(int), x & 0x7F) for x in (a, b))
  return np.abs(a - b)


def fp8_error_bound(y: np.ndarray, dtype) -> np.ndarray:
  """Largest error of rounding |y| <= qmax to nearest: half a step.

  A step is 2^(1-bits) of the binade's lower end, hence at most as much of |y|,
  and the subnormal step below.
  """
  relative = 2.0 ** -(MANTISSA_BITS[dtype] + 1)
  return np.maximum(relative * np.abs(y), SUBNORMAL_STEP[dtype] / 2)


def bfloat16_at_least(x: np.ndarray) -> np.ndarray:
  """The smallest bfloat16 that is not below each positive f32."""
  nearest = x.astype(ml_dtypes.bfloat16)
  above = np.nextafter(nearest, np.asarray(np.inf, nearest.dtype))
  return np.where(nearest.astype(np.float32) < x, above, nearest)


def split(x: np.ndarray, group_size: int) -> list[np.ndarray]:
  """The groups of a row, the last one possibly short."""
  return [x[i : i + group_size] for i in range(0, len(x), group_size)]


def quantize(x, group_size, dtype=E4M3, scale_dtype=np.float32):
  """Codes (bits) and scales of f32 [rows, n], group by group, in f32."""
  codes, scales = np.zeros(x.shape, np.uint8), []
  for row, values in enumerate(x):
    scales.append([])
    for g, group in enumerate(split(values, group_size)):
      amax = np.max(np.abs(group))
      scale = np.float32(amax) * np.float32(1 / QMAX[dtype])
      scale = max(scale, np.float32(SMALLEST_NORMAL)) if amax else 1.0
      if scale_dtype == ml_dtypes.bfloat16:
        scale = bfloat16_at_least(np.float32([scale]))[0]
      quotient = group / np.float32(scale)
      at = g * group_size
      codes[row, at : at + group_size] = fp8_cast(quotient, dtype)
      scales[-1].append(scale)
  return codes, np.array(scales, scale_dtype)


# Moment codecs. Statistics and codes of one or more groups, [..., group_size]
# float64 magnitudes; `range` and `amax` as docs and codecs define them.


def magnitudes(x: np.ndarray) -> np.ndarray:
  """|x| in float64, subnormals as zero."""
  x = np.abs(x.astype(np.float64))
  return np.where(x < SMALLEST_NORMAL, 0.0, x)


def amax_amin(magnitude: np.ndarray):
  """Largest and smallest nonzero magnitude; both 1 in a group of zeros."""
  amax = magnitude.max(-1)
  amin = np.where(magnitude > 0, magnitude, np.inf).min(-1)
  return np.where(amax > 0, amax, 1), np.where(amax > 0, amin, 1)


def coat_power(magnitude: np.ndarray, dtype) -> np.ndarray:
  """k in sixteenths: floored, between 1 and 255."""
  amax, amin = amax_amin(magnitude)
  octaves = np.log2(amax / amin)
  with np.errstate(divide="ignore"):
    power = np.log2(QMAX[dtype] ** 2 / 2) / octaves
  return np.clip(np.floor(power * 16), 1, 255).astype(np.uint8)


def exponent_bounds(magnitude: np.ndarray):
  """Biased exponents of 2^upper >= amax and of 2^lower <= amin."""
  amax, amin = amax_amin(magnitude)
  upper = np.ceil(np.log2(amax)).astype(int) + 127
  lower = np.floor(np.log2(amin)).astype(int) + 127
  zero = magnitude.max(-1) == 0
  upper = np.where(zero, 1, np.minimum(upper, 254))
  return upper, np.where(zero, 1, np.minimum(lower, upper))


class Expansion:
  """Codes of y = (|x| / bound)^k qmax; decoding is the inverse."""

  def __init__(self, bound, k, dtype):
    self.bound, self.k, self.dtype = bound[..., None], k[..., None], dtype
    self.top = len(fp8_values(dtype)) - 1

  def image(self, magnitude):
    bound = np.where(self.bound == 0, 1, self.bound)
    t = np.minimum(magnitude / bound, 1)
    t = np.where(t < SMALLEST_NORMAL, 0, t)
    return t**self.k * QMAX[self.dtype]

  def decode(self, code):
    y = fp8_values(self.dtype)[code]
    return (y / QMAX[self.dtype]) ** (1 / self.k) * self.bound

  def nearest(self, magnitude):
    return fp8_nearest(self.image(magnitude), self.dtype)

  def lower(self, magnitude):
    """The code whose value is the neighbour below (or equal)."""
    values = fp8_values(self.dtype)
    # An image that misses a code by float64's rounding is that code.
    y = self.image(magnitude) * (1 + 2.0**-45)
    return np.clip(np.searchsorted(values, y, "right") - 1, 0, self.top)


class LogCode:
  """Codes uniform in log x between 2^lower and 2^upper; 0 is zero."""

  def __init__(self, upper, lower, levels):
    octaves = np.maximum(upper - lower, 1)
    self.upper, self.step = upper[..., None], octaves[..., None] / (levels - 1)
    self.top = levels

  def place(self, magnitude):
    with np.errstate(divide="ignore"):
      place = (np.log2(magnitude) - (self.upper - 127)) / self.step
    return np.clip(place + self.top, 1, self.top)

  def decode(self, code):
    value = 2.0 ** ((code - self.top) * self.step + self.upper - 127)
    return np.where(code == 0, 0.0, value)

  def nearest(self, magnitude):
    return np.where(magnitude > 0, np.rint(self.place(magnitude)), 0).astype(
      int
    )

  def lower(self, magnitude):
    floor = np.floor(self.place(magnitude) + 2.0**-40)
    return np.where(magnitude > 0, floor, 0).astype(int)


def stochastic(code, magnitude, noise):
  """(codes, lower neighbour, upper neighbour): up where the share is above."""
  lower = code.lower(magnitude)
  upper = np.where(magnitude > 0, np.minimum(lower + 1, code.top), lower)
  below, above = code.decode(lower), code.decode(upper)
  value = np.minimum(magnitude, code.decode(np.full_like(lower, code.top)))
  up = value - below > noise * (above - below)
  return np.where(up, upper, lower), below, above


# Random words.

MASK = 0xFFFFFFFF


def mix(word: int) -> int:
  """lowbias32, from its publication, on Python integers."""
  word ^= word >> 16
  word = word * 0x7FEB352D & MASK
  word ^= word >> 15
  word = word * 0x846CA68B & MASK
  return word ^ (word >> 16)


def leaf_key(seed: int, step: int, leaf: int) -> int:
  """The word of a leaf at a step."""
  key = 0
  for part in (seed, step, leaf):
    key = mix(((key + part) * 0x9E3779B9 + 1) & MASK)
  return key


def word(key: int, row: int, column: int) -> int:
  """The word of one element."""
  row_word = mix((row * 0x9E3779B9 + key) & MASK)
  run = mix((column // 8 * 0x9E3779B9 + row_word) & MASK)
  return run * 0x915F77F5 ** (column % 8) & MASK
