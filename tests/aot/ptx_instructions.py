# SPDX-License-Identifier: Apache-2.0
"""NumPy equivalents of PTX types and instructions."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

TYPES = {
  "f16": np.float16, "f32": np.float32, "pred": bool,
  "bf16": ml_dtypes.bfloat16,
  "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
  "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
  "u32": np.uint32, "s32": np.int32, "b32": np.uint32,
  "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
  "bf16x2": np.uint32, "u16x2": np.uint32, "f16x2": np.uint32,
}  # fmt: skip
HALVES = {
  "bf16x2": ml_dtypes.bfloat16,
  "u16x2": np.uint16,
  "f16x2": np.float16,
}
FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
COMPARISONS: dict[str, Callable] = {
  "eq": np.equal,
  "ne": lambda a, b: (a != b) & (a == a) & (b == b),
  "neu": np.not_equal,
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
  "num": lambda a, b: (a == a) & (b == b),
  "nan": lambda a, b: (a != a) | (b != b),
}
_FUNCTIONS: dict[str, Callable] = {
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "div": np.divide,
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
  "not": np.invert,
  "shl": lambda a, b: np.where(b < 32, a << (b & 31), 0).astype(a.dtype),
  "shr": lambda a, b: np.where(b < 32, a >> (b & 31), 0).astype(a.dtype),
  "neg": np.negative,
  "abs": np.abs,
  "mov": lambda a: a,
  "lg2": np.log2,
  "ex2": np.exp2,
  "rcp": np.reciprocal,
  "sqrt": np.sqrt,
  "rsqrt": lambda x: 1 / np.sqrt(x),
}


def apply(name: str, modifiers: list[str], args: list) -> np.ndarray:
  """Applies an instruction whose operands all have the same type."""
  if "xorsign" in modifiers:
    sign = np.signbit(args[0]) ^ np.signbit(args[1])
    args = [np.abs(x) for x in args]
    out = apply(name, [m for m in modifiers if m != "xorsign"], args)
    return np.where(sign, -out, out)
  if name in ("min", "max"):
    carries = "NaN" in modifiers or args[0].dtype.kind not in "fV"
    with_nan, without = {
      "min": (np.minimum, np.fmin),
      "max": (np.maximum, np.fmax),
    }[name]
    return (with_nan if carries else without)(*args)
  if name == "fma":
    a, b, c = (x.astype(np.float64) for x in args)
    return (a * b + c).astype(args[0].dtype)
  if "ftz" in modifiers:
    args = [_flushed(x) for x in args]
  if name in ("lg2", "ex2", "rcp", "sqrt", "rsqrt"):
    out = _FUNCTIONS[name](args[0].astype(np.float64)).astype(np.float32)
  else:
    out = _FUNCTIONS[name](*args)
  return _flushed(out) if "ftz" in modifiers else out


def _flushed(x: np.ndarray) -> np.ndarray:
  return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def to_fp8(x: np.ndarray, dtype) -> np.ndarray:
  """Returns the FP8 codes of x, rounded to nearest even and saturated."""
  largest = float(ml_dtypes.finfo(dtype).max)
  clipped = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
  return np.where(np.isnan(x), np.uint8(0x7F), clipped)


def permuted(a, b, selector) -> np.ndarray:
  """Selects each byte of the result by 4 bits of `selector`, like `prmt`.

  If the highest of the 4 bits is set, all bits of the byte are the selected
  byte's sign.
  """
  both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
  out = np.zeros_like(a)
  for i in range(4):
    nibble = selector >> (4 * i)
    byte = both >> ((nibble & 7) * 8).astype(np.uint64)
    byte = (byte & np.uint64(0xFF)).astype(np.uint32)
    byte = np.where(nibble & 8, (byte >> 7) * 0xFF, byte).astype(np.uint32)
    out |= byte << (8 * i)
  return out
