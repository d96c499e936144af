# SPDX-License-Identifier: Apache-2.0
"""Emits MLIR and PTX within kernels: numbers, vectors, bytes, loads, stores."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


def thread():
  """Returns the index of this thread in its warpgroup."""
  # Side effects keep the compiler from holding the index in a register.
  code = "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }"
  return llvm.inline_asm(i32_type(), [], code, "=r", has_side_effects=True)


def i32_type():
  return ir.IntegerType.get_signless(32)


def i32(value: int):
  value -= (value >> 31) << 32  # Reinterpret it as a signed integer.
  return arith.constant(i32_type(), ir.IntegerAttr.get(i32_type(), value))


def element(x, i: int):
  return vector.extract(x, dynamic_position=[], static_position=[i])


def elements(x) -> list:
  """Returns the elements of a vector as a list."""
  [size] = x.type.shape
  return [element(x, i) for i in range(size)]


def pairs(words: list, selector: int) -> list:
  """Applies `prmt` to each pair of consecutive registers."""
  evens, odds = words[::2], words[1::2]
  return [prmt(a, b, selector) for a, b in zip(evens, odds, strict=True)]


def scalar(register):
  """Returns the number in a register that may be a vector of one number."""
  is_vector = isinstance(register.type, ir.VectorType)
  return element(register, 0) if is_vector else register


def array(
  registers: Iterable,
  shape: tuple[int, ...],
  layout,
  is_signed: bool | None = None,
) -> mgpu.FragmentedArray:
  """Makes an array of a thread's registers; integers require `is_signed`."""
  layout = layout.to_mgpu()
  found = np.empty(layout.registers_shape(shape), object)
  for i, register in zip(np.ndindex(found.shape), registers, strict=True):
    found[i] = register
  return mgpu.FragmentedArray(
    _registers=found, _layout=layout, _is_signed=is_signed
  )


def asm(code: str, *args, result=None):
  """Emits PTX on 32-bit registers, with an i32 result by default."""
  result = i32_type() if result is None else result
  kinds = ["f" if isinstance(a.type, ir.F32Type) else "r" for a in args]
  kinds = ["=f" if isinstance(result, ir.F32Type) else "=r", *kinds]
  return llvm.inline_asm(result, list(args), code, ",".join(kinds))


def f32(code: str, *args):
  """Emits PTX whose result is an f32."""
  return asm(code, *args, result=ir.F32Type.get())


def number(x: float) -> str:
  """Formats a number as an f32 literal in PTX."""
  return f"0f{struct.pack('>f', x).hex().upper()}"


def prmt(a, b, selector: int):
  """Selects 4 of the 8 bytes in two registers.

  Each hexadecimal digit of `selector` selects one byte, from 0 (lowest of a) to
  7 (highest of b). The lowest digit determines the lowest byte of the result.
  """
  return asm(f"prmt.b32 $0, $1, $2, {selector};", a, b)


def transposed(words: Sequence) -> list:
  """Transposes the 4 x 4 bytes in four registers."""
  (a, b), (c, d) = (
    [prmt(first, second, selector) for selector in (0x5140, 0x7362)]
    for first, second in (words[:2], words[2:])
  )
  return [
    prmt(first, second, selector)
    for first, second in ((a, c), (b, d))
    for selector in (0x5410, 0x7632)
  ]


def store_shared(address, offset: int, word) -> None:
  """Writes 4 bytes to shared memory."""
  code = f"st.shared.b32 [$0+{offset}], $1;"
  llvm.inline_asm(None, [address, word], code, "r,r", has_side_effects=True)


def load_shared(address, offset: int) -> list:
  """Reads 16 bytes from shared memory as four words."""
  return _load("ld.shared.v4.b32", address, "r", offset, has_side_effects=True)


def load_global(address, offset: int) -> list:
  """Reads 16 bytes that the kernel never writes, as four words."""
  return _load("ld.global.nc.v4.b32", address, "l", offset)


def _load(instruction: str, address, kind: str, offset: int, **options) -> list:
  found = llvm.inline_asm(
    llvm.StructType.get_literal([i32_type()] * 4),
    [address],
    f"{instruction} {{$0, $1, $2, $3}}, [$4+{offset}];",
    f"=r,=r,=r,=r,{kind}",
    **options,
  )
  return [llvm.extractvalue(i32_type(), found, [i]) for i in range(4)]
