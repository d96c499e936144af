# SPDX-License-Identifier: Apache-2.0
"""Executes the PTX of a kernel in NumPy, for tests without a GPU.

Pallas' interpreter runs neither inlined PTX nor the compiled kernel. This
machine executes the PTX that the compiler passes to ptxas. All threads must
take the same branches. All threads execute an instruction before any of them
executes the next one, so the machine cannot find a missing barrier.
Instructions that our kernels do not use raise an error.

The machine rounds the results of approximate instructions (lg2, ex2, rcp, sqrt,
div) correctly to f32. It does not run ptxas, but refuses code that ptxas is
known to compile wrongly.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from tests.aot.ptx_instructions import (
  COMPARISONS,
  FP8,
  HALVES,
  TYPES,
  apply,
  permuted,
  to_fp8,
)

_WIDTHS = {"p": bool, "rs": np.uint16, "rd": np.uint64, "r": np.uint32}
_COMMENT = re.compile(r"//.*")
_SIZE = re.compile(r"\.(?:max|req)ntid (\d+)")  # Matches the threads per block.
_PARAMETER = 8  # Size in bytes of a parameter, which is a pointer.
_SHARED = 2**16  # Bytes of shared memory per block.


class Machine:
  """Runs the blocks of a kernel in lockstep.

  Args:
    ptx: text of one kernel.
    arrays: where the kernel's parameters point. `run` writes to these arrays.
    grid: number of blocks along x and y.
  """

  def __init__(
    self, ptx: str, arrays: Sequence[np.ndarray], grid: tuple[int, int]
  ):
    self._body = ptx[ptx.index("\n{") :]
    count = len(re.findall(r"^\s*\.param", ptx, re.MULTILINE))
    if count != len(arrays):
      raise ValueError(f"ptx_machine: {count} parameters, got {len(arrays)}")
    [size] = map(int, _SIZE.findall(ptx))
    blocks = math.prod(grid)
    threads = np.arange(blocks * size, dtype=np.uint32)
    block = threads // size
    self._registers: dict[str, np.ndarray] = {
      "%tid.x": threads % size,
      "%ctaid.x": block % grid[0],
      "%ntid.x": threads * 0 + size,
    }
    self._shared = np.zeros(blocks * _SHARED, np.uint8)
    self._first_shared = block.astype(np.int64) * _SHARED
    for axis in "yz":
      for kind in ("tid", "ctaid"):
        self._registers[f"%{kind}.{axis}"] = threads * 0
      self._registers[f"%ntid.{axis}"] = threads * 0 + 1
    self._registers["%ctaid.y"] = block // grid[0]
    # Addresses of shared memory are offsets from its start.
    for name in re.findall(r"\.shared [^;]* (\w+)(?:\[\d*\])?;", ptx):
      self._registers[name] = threads.astype(np.uint64) * np.uint64(0)
    self._arrays = arrays
    self._bases, size = [], 256  # Address 0 is the null pointer.
    for x in arrays:
      self._bases.append(size)
      size += -(-x.nbytes // 256) * 256
    self._memory = np.zeros(size, np.uint8)
    self._numbers: set[str] = set()  # Registers with results of f32 arithmetic.

  def run(self) -> None:
    for base, x in zip(self._bases, self._arrays, strict=True):
      self._memory[base : base + x.nbytes] = x.reshape(-1).view(np.uint8)
    statements, labels = _statements(self._body)
    place = 0
    with np.errstate(all="ignore"):
      while place < len(statements):
        statement = statements[place]
        place += 1
        guard, branch = re.fullmatch(
          r"(?:@(!?%\w+) )?(bra\S* \S+)?.*", statement
        ).groups()
        if branch is None:
          assert guard is None, statement
          self._execute(statement)
        elif guard is None or self._all(guard):
          place = labels[branch.split()[-1]]
    for base, x in zip(self._bases, self._arrays, strict=True):
      x.reshape(-1).view(np.uint8)[:] = self._memory[base : base + x.nbytes]

  def _all(self, guard: str) -> bool:
    """Returns a predicate's value, which must be the same in all threads."""
    values = self._get(guard.lstrip("!"), bool) ^ guard.startswith("!")
    assert np.all(values == values[0]), guard
    return bool(values[0])

  def _execute(self, statement: str) -> None:
    opcode, _, rest = statement.partition(" ")
    operands = _operands(rest)
    name, *modifiers = opcode.split(".")
    if name in ("ret", "fence", "bar"):
      return
    if name == "ld" and modifiers[0].startswith("param"):
      index = self._address(operands[1]) // _PARAMETER
      self._set(operands[0], np.uint64(self._bases)[index])
    elif name == "ld":
      self._load(modifiers, operands)
    elif name == "st":
      self._store(modifiers, operands)
    elif name == "elect":
      register, _, predicate = operands[0].partition("|")
      self._set(register, np.uint32(0))
      self._set(predicate, self._registers["%tid.x"] % 32 == 0)
    elif name == "mov" and operands[0].startswith("{"):
      low, high = _operands(operands[0][1:-1])
      x = self._get(operands[1], np.uint32)
      self._set(low, x.astype(np.uint16))
      self._set(high, (x >> 16).astype(np.uint16))
    elif name == "mov" and operands[1].startswith("{"):
      low, high = (
        self._get(x, np.uint16).astype(np.uint32)
        for x in _operands(operands[1][1:-1])
      )
      self._set(operands[0], low | high << 16)
    elif name == "shfl":
      self._set(operands[0], self._shuffled(modifiers[1], *operands[1:4]))
    else:
      self._set(operands[0], self._computed(name, modifiers, operands[1:]))
      if name != "cvt" and modifiers[-1] == "f32":
        self._numbers.add(operands[0])

  def _set(self, register: str, x) -> None:
    """Writes the bits of x to a register."""
    x = np.broadcast_to(x, self._registers["%tid.x"].shape)
    if x.dtype != bool:
      x = x.view(f"u{x.dtype.itemsize}")
      width = _WIDTHS.get((re.findall(r"^%([a-z]+)\d", register) or [""])[0])
      if width is not None and width != x.dtype:
        assert x.dtype.itemsize < np.dtype(width).itemsize, register
        x = x.astype(width)
    self._registers[register] = x

  def _get(self, operand: str, dtype) -> np.ndarray:
    """Reads the lowest bits of an operand as numbers of `dtype`."""
    dtype = np.dtype(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    if operand in self._registers:
      x = self._registers[operand]
      if dtype.kind == "b":
        return x
      return x.astype(bits).view(dtype)
    if found := re.search(r"_param_(\d+)$", operand):
      x = np.uint64(_PARAMETER * int(found[1]))  # The parameter's address.
    elif operand.startswith("0f"):
      x = np.uint32(int(operand[2:], 16))
    else:
      x = np.uint64(int(operand.rstrip("U"), 0) % 2**64)
    x = np.full(self._registers["%tid.x"].shape, x)
    return x.astype(bits).view(dtype)

  def _address(self, operand: str) -> np.ndarray:
    register, _, offset = operand.strip("[]").partition("+")
    return self._get(register, np.int64) + int(offset or 0)

  def _load(self, modifiers, operands) -> None:
    dtype, registers = _vector(modifiers, operands[0])
    memory, places = self._places(modifiers, operands[1], dtype, len(registers))
    for register, at in zip(registers, places, strict=True):
      values = np.ascontiguousarray(memory[at]).view(dtype)
      self._set(register, values[:, 0])

  def _store(self, modifiers, operands) -> None:
    dtype, registers = _vector(modifiers, operands[1])
    if dtype.itemsize == 1 and self._numbers.intersection(registers):
      raise ValueError(
        "ptx_machine: the lowest byte of a sum of f32 is stored; ptxas 13 "
        "converts the sum (F2IP) in place of taking its byte"
      )
    memory, places = self._places(modifiers, operands[0], dtype, len(registers))
    for register, at in zip(registers, places, strict=True):
      values = np.ascontiguousarray(self._get(register, dtype))
      memory[at] = values[:, None].view(np.uint8)

  def _places(
    self, modifiers, operand: str, dtype: np.dtype, count: int
  ) -> tuple[np.ndarray, list]:
    """Returns the memory that an operand addresses, and indices into it.

    The list has one array for each of `count` values: indices of its bytes.
    """
    size, first = dtype.itemsize, self._address(operand)
    is_shared = modifiers[0].startswith("shared")
    if is_shared:
      assert np.all((first >= 0) & (first + count * size <= _SHARED))
      first = first + self._first_shared
    first = first[:, None] + np.arange(size)
    memory = self._shared if is_shared else self._memory
    return memory, [first + i * size for i in range(count)]

  def _shuffled(self, mode: str, source: str, b: str, c: str) -> np.ndarray:
    """Shuffles values among lanes of a warp, as PTX defines `shfl`."""
    x, b_, c_ = (self._get(s, np.uint32) for s in (source, b, c))
    lane = self._registers["%tid.x"] % 32
    segment, clamp = (c_ >> 8) & 31, c_ & 31
    last = (lane & segment) | (clamp & ~segment)
    if mode == "idx":
      j = (lane & segment) | (b_ & 31 & ~segment)
    elif mode == "bfly":
      j = lane ^ (b_ & 31)
    else:
      raise NotImplementedError(mode)
    j = np.where(j <= last, j, lane)
    return x.reshape(-1, 32)[np.arange(x.size) // 32, j]

  def _computed(self, name: str, modifiers: list[str], operands) -> np.ndarray:
    kind = modifiers[-1]
    if name == "cvt":
      return self._converted(modifiers, operands)
    if name == "setp":
      a, b = (self._get(x, TYPES[kind]) for x in operands)
      return COMPARISONS[modifiers[0]](a, b)
    if name == "testp":
      assert modifiers[0] == "infinite"
      return np.isinf(self._get(operands[0], np.float32))
    if name == "redux":
      assert modifiers[1] == "max"
      x = self._get(operands[0], TYPES[kind]).reshape(-1, 32)
      return np.repeat(np.max(x, axis=1), 32)
    if name in ("selp", "copysign"):
      a, b = (self._get(x, TYPES[kind]) for x in operands[:2])
      if name == "copysign":
        return np.copysign(b, a)
      return np.where(self._get(operands[2], bool), a, b)
    if name == "prmt":
      return permuted(*(self._get(x, np.uint32) for x in operands))
    if name == "cvta":
      return self._get(operands[0], np.uint64)
    if name == "bfe":
      a, start, count = (self._get(x, np.uint32) for x in operands)
      bits = a >> start & (np.uint32(1) << count) - np.uint32(1)
      if kind == "s32":
        sign = np.uint32(1) << count - np.uint32(1)
        bits = (bits ^ sign) - sign
      return bits
    if name == "mad":
      a, b, c = (self._get(x, np.uint32) for x in operands)
      return a * b + c
    if name == "mul" and modifiers[0] == "wide":
      wide = np.dtype(f"{'iu'[kind[0] == 'u']}{2 * int(kind[1:]) // 8}")
      a, b = (self._get(x, TYPES[kind]).astype(wide) for x in operands)
      return a * b
    if name == "mul" and modifiers[0] == "hi":
      a, b = (self._get(x, TYPES[kind]).astype(np.uint64) for x in operands)
      return (a * b >> int(kind[1:])).astype(TYPES[kind])
    args = [self._get(x, TYPES[kind]) for x in operands]
    if kind.endswith("x2"):
      args = [np.ascontiguousarray(x).view(HALVES[kind]) for x in args]
      return np.ascontiguousarray(apply(name, modifiers, args)).view(np.uint32)
    return apply(name, modifiers, args)

  def _converted(self, modifiers, operands) -> np.ndarray:
    to, source = [m for m in modifiers if m not in ("rn", "rzi", "satfinite")]
    if to in FP8:
      high, low = (self._get(x, np.float32) for x in operands)
      high, low = (to_fp8(x, FP8[to]).astype(np.uint16) for x in (high, low))
      return high << 8 | low
    if source in FP8:
      pair = np.ascontiguousarray(self._get(operands[0], np.uint16))
      return pair.view(FP8[source]).astype(np.float16).view(np.uint32)
    if to == "s8":  # The register has 16 bits.
      return self._get(operands[0], np.int8).astype(np.int16)
    x = self._get(operands[0], TYPES[source])
    if "rzi" in modifiers:
      x = np.where(
        np.isnan(x), 0, np.clip(np.trunc(x), -(2.0**31), 2.0**31 - 128)
      )
    return x.astype(TYPES[to])


def _statements(body: str) -> tuple[list[str], dict[str, int]]:
  """Returns instructions as text, and the index to which each label points.

  Scopes and directives are left out.
  """
  lines = [_COMMENT.sub("", line).strip() for line in body.split("\n")]
  kept = [
    line
    for line in lines
    if line and not line.startswith((".loc", ".file", ".section"))
  ]
  out, labels = [], {}
  for statement in " ".join(kept).split(";"):
    statement = " ".join(statement.split())
    while statement.startswith(("{", "}")):
      statement = statement[1:].strip()
    while found := re.match(r"(\$\w+):\s*", statement):
      labels[found[1]] = len(out)
      statement = statement[found.end() :]
    if statement and not statement.startswith("."):
      out.append(statement)
    if statement == "ret":
      return out, labels
  raise ValueError("ptx_machine: the program does not end")


def _operands(text: str) -> list[str]:
  """Splits operands at commas that are not in braces."""
  found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text)
  return [x.strip() for x in found]


def _vector(modifiers: list[str], operand: str) -> tuple[np.dtype, list[str]]:
  """Returns the type that is loaded or stored, and the registers."""
  registers = _operands(operand[1:-1]) if operand.startswith("{") else [operand]
  return np.dtype(TYPES[modifiers[-1]]), registers
