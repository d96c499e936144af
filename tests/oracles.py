# SPDX-License-Identifier: Apache-2.0
"""Independent NumPy versions of quantization, moment codecs and random words.

Tests compare coat_jax with these. Nothing here calls coat_jax or JAX. FP8
rounding searches the table of all values of the format, and moment codecs are
computed in float64.
"""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
QMAX = {E4M3: 448.0, E5M2: 57344.0}
SUBNORMAL_STEP = {E4M3: 2.0**-9, E5M2: 2.0**-16}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST_NORMAL = 2.0**-126  # In f32. Smaller values count as zero.


def fp8_values(dtype) -> np.ndarray:
  """Returns the finite values of codes 0, 1, 2, ... in float64, ascending."""
  values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
  return values[np.isfinite(values)]


def fp8_nearest(magnitude: np.ndarray, dtype) -> np.ndarray:
  """Rounds magnitudes to uint8 codes: to nearest even, saturating."""
  values = fp8_values(dtype)
  y = np.minimum(np.asarray(magnitude, np.float64), values[-1])
  lower = np.clip(np.searchsorted(values, y, "right") - 1, 0, len(values) - 2)
  to_lower, to_upper = y - values[lower], values[lower + 1] - y
  odd = lower % 2 == 1
  up = (to_upper < to_lower) | ((to_upper == to_lower) & odd)
  return (lower + up).astype(np.uint8)


def fp8_cast(x: np.ndarray, dtype) -> np.ndarray:
  """Casts finite values to uint8 codes with signs, saturating."""
  codes = fp8_nearest(np.abs(x), dtype)
  return codes | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)


def codes_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns how many codes apart two FP8 codes are, 0 if they are equal."""
  # Convert sign and magnitude to an ordered integer, where +0 and -0 are equal.
  a, b = (np.where(x & 0x80, -(x & 0x7F).astype(int), x & 0x7F) for x in (a, b))
  return np.abs(a - b)


def fp8_error_bound(y: np.ndarray, dtype) -> np.ndarray:
  """Returns half a step: a bound on the error of rounding |y| <= qmax.

  A step is at most 2^-mantissa_bits * |y|, or the subnormal step if that is
  larger.
  """
  relative = 2.0 ** -(MANTISSA_BITS[dtype] + 1)
  return np.maximum(relative * np.abs(y), SUBNORMAL_STEP[dtype] / 2)


def bfloat16_at_least(x: np.ndarray) -> np.ndarray:
  """Rounds positive f32 values up to bfloat16."""
  nearest = x.astype(ml_dtypes.bfloat16)
  above = np.nextafter(nearest, np.asarray(np.inf, nearest.dtype))
  return np.where(nearest.astype(np.float32) < x, above, nearest)


def split(x: np.ndarray, group_size: int) -> list[np.ndarray]:
  """Splits a row into groups; the last one may be short."""
  return [x[i : i + group_size] for i in range(0, len(x), group_size)]


def quantize(x, group_size, dtype=E4M3, scale_dtype=np.float32):
  """Quantizes f32 [rows, n] group by group; returns uint8 codes and scales."""
  codes, scales = np.zeros(x.shape, np.uint8), []
  for row, values in enumerate(x):
    scales.append([])
    for g, group in enumerate(split(values, group_size)):
      amax = np.max(np.abs(group))
      scale = np.float32(amax) * np.float32(1 / QMAX[dtype])
      scale = max(scale, np.float32(SMALLEST_NORMAL))
      if scale_dtype == ml_dtypes.bfloat16:
        scale = bfloat16_at_least(np.float32([scale]))[0]
      quotient = group / np.float32(scale)
      at = g * group_size
      codes[row, at : at + group_size] = fp8_cast(quotient, dtype)
      scales[-1].append(scale)
  return codes, np.array(scales, scale_dtype)


# --- Moment codecs -----------------------------------------------------------
# Magnitudes are float64 [..., group_size].


def magnitudes(x: np.ndarray) -> np.ndarray:
  """Returns |x| in float64, with zero for subnormals."""
  x = np.abs(x.astype(np.float64))
  return np.where(x < SMALLEST_NORMAL, 0.0, x)


def amax_amin(magnitude: np.ndarray):
  """Returns the largest and smallest nonzero magnitude of each group.

  Both are 1 if all values are zero.
  """
  amax = magnitude.max(-1)
  amin = np.where(magnitude > 0, magnitude, np.inf).min(-1)
  return np.where(amax > 0, amax, 1), np.where(amax > 0, amin, 1)


def coat_power(magnitude: np.ndarray, dtype) -> np.ndarray:
  """Returns COAT's power k in sixteenths, rounded down, within 1..255."""
  amax, amin = amax_amin(magnitude)
  octaves = np.log2(amax / amin)
  with np.errstate(divide="ignore"):
    power = np.log2(QMAX[dtype] ** 2 / 2) / octaves
  return np.clip(np.floor(power * 16), 1, 255).astype(np.uint8)


def exponent_bounds(magnitude: np.ndarray):
  """Returns the biased exponents of 2^upper >= amax and 2^lower <= amin."""
  amax, amin = amax_amin(magnitude)
  upper = np.ceil(np.log2(amax)).astype(int) + 127
  lower = np.floor(np.log2(amin)).astype(int) + 127
  zero = magnitude.max(-1) == 0
  upper = np.where(zero, 1, np.minimum(upper, 254))
  return upper, np.where(zero, 1, np.minimum(lower, upper))


class Expansion:
  """Encodes magnitudes as FP8 codes of (|x| / bound)^k * qmax; decodes them."""

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
    """Returns the largest code whose value is at most `magnitude`."""
    values = fp8_values(self.dtype)
    # Round up slightly, in case float64 rounding put y just below a code.
    y = self.image(magnitude) * (1 + 2.0**-45)
    return np.clip(np.searchsorted(values, y, "right") - 1, 0, self.top)


class LogCode:
  """Encodes magnitudes uniformly in log x between 2^lower and 2^upper.

  Code 0 stands for zero.
  """

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
  """Rounds stochastically; returns codes and the decoded neighbours.

  A value is rounded up if its position between the neighbours exceeds `noise`.
  """
  lower = code.lower(magnitude)
  upper = np.where(magnitude > 0, np.minimum(lower + 1, code.top), lower)
  below, above = code.decode(lower), code.decode(upper)
  value = np.minimum(magnitude, code.decode(np.full_like(lower, code.top)))
  up = value - below > noise * (above - below)
  return np.where(up, upper, lower), below, above


# --- Random words ------------------------------------------------------------

MASK = 0xFFFFFFFF


def mix(word: int) -> int:
  """Hashes a word with lowbias32, as published, on Python integers."""
  word ^= word >> 16
  word = word * 0x7FEB352D & MASK
  word ^= word >> 15
  word = word * 0x846CA68B & MASK
  return word ^ (word >> 16)


def leaf_key(seed: int, step: int, leaf: int) -> int:
  """Returns the key of a leaf at a step."""
  key = 0
  for part in (seed, step, leaf):
    key = mix(((key + part) * 0x9E3779B9 + 1) & MASK)
  return key


def word(key: int, row: int, column: int) -> int:
  """Returns the random word of one element."""
  row_word = mix((row * 0x9E3779B9 + key) & MASK)
  run = mix((column // 8 * 0x9E3779B9 + row_word) & MASK)
  return run * 0x915F77F5 ** (column % 8) & MASK
