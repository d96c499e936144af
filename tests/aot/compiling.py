# SPDX-License-Identifier: Apache-2.0
"""Helpers to examine programs that were compiled for an H200.

Tests that compile are marked `aot`. `make test-aot` installs the compiler for
CUDA and runs them; without the compiler they are skipped.

  compiled = compile_for_h200(fn, jax.ShapeDtypeStruct((8192, 4096), E4M3), ...)
  assert len(fp8_matmul_calls(compiled)) == 1
  assert not fp8_moves(compiled)
  assert temporary_bytes(compiled) < 2**20

An instruction in the body of a loop counts once.
"""

import collections
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.aot import compile_for_h200, peak_bytes, temporary_bytes

__all__ = [
  "Instruction",
  "bytes_moved",
  "check_wgmma",
  "compile_for_h200",
  "custom_calls",
  "fp8_matmul_calls",
  "fp8_moves",
  "instructions",
  "peak_bytes",
  "ptxas_reports",
  "temporary_bytes",
]

# A fusion of only these operations moves values and computes nothing.
_MOVES = {
  "bitcast",
  "concatenate",
  "copy",
  "pad",
  "reshape",
  "slice",
  "transpose",
}
_NO_WORK = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\("
)


class Instruction(NamedTuple):
  """One instruction of optimized HLO: "%name = shape opcode(...)"."""

  computation: str
  name: str
  shape: str
  opcode: str
  text: str


def instructions(compiled: jax.stages.Compiled) -> list[Instruction]:
  """Returns all instructions in textual order, including those in fusions."""
  found, computation = [], ""
  for line in compiled.as_text().splitlines():
    if start := _COMPUTATION.match(line):
      computation = start[1]
    elif instruction := _INSTRUCTION.match(line):
      found.append(Instruction(computation, *instruction.groups(), line))
  return found


def launches(compiled: jax.stages.Compiled) -> list[str]:
  """Returns the opcode of each instruction that launches a kernel, in order."""
  free = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant")
  main = compiled.as_text().split("ENTRY ")[1]
  return [
    i.opcode
    for i in instructions(compiled)
    if i.opcode not in free and i.text in main
  ]


def bytes_moved(compiled: jax.stages.Compiled) -> int:
  """Returns the total bytes that all launches read and write.

  Each launch counts as reading its operands and writing its result once.
  """
  main = compiled.as_text().split("ENTRY ")[1]
  shapes = {i.name: i.shape for i in instructions(compiled) if i.text in main}
  total = 0
  for i in instructions(compiled):
    if i.text not in main or i.opcode in _NO_WORK:
      continue
    operands = i.text.split(f"{i.opcode}(", 1)[1].split("), ")[0]
    names = dict.fromkeys(re.findall(r"%([\w.\-]+)", operands))
    total += _bytes(i.shape) + sum(_bytes(shapes[name]) for name in names)
  return total


def _bytes(shape: str) -> int:
  """Returns the size in bytes of a shape like "(f32[2,3]{1,0}, pred[])"."""
  total = 0
  for name, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
    size = 8 if name == "pred" else int(re.findall(r"\d+", name)[0])
    total += size // 8 * math.prod(int(d) for d in dims.split(",") if d)
  return total


def custom_calls(compiled: jax.stages.Compiled) -> collections.Counter[str]:
  """Counts custom calls by target, including our kernels."""
  return collections.Counter(
    match[1]
    for instruction in instructions(compiled)
    if (match := re.search(r'custom_call_target="([^"]+)"', instruction.text))
  )


def fp8_matmul_calls(compiled: jax.stages.Compiled) -> list[Instruction]:
  """Returns the FP8 matmuls that run on cuBLASLt."""
  return [
    instruction
    for instruction in instructions(compiled)
    if 'custom_call_target="__cublas$lt$matmul$f8"' in instruction.text
  ]


def fp8_moves(compiled: jax.stages.Compiled) -> list[Instruction]:
  """Returns instructions that only move FP8 values, such as copies and pads.

  A fusion counts if all its operations only move values. A fusion that computes
  a result and writes it transposed does not count.
  """
  everything = instructions(compiled)
  bodies = collections.defaultdict(set)
  for instruction in everything:
    bodies[instruction.computation].add(instruction.opcode)
  called = {}
  for instruction in everything:
    if instruction.opcode == "fusion":
      match = re.search(r"calls=%?([\w.\-]+)", instruction.text)
      assert match, instruction.text
      called[instruction.name] = match[1]
  fused = set(called.values())

  def moves(instruction):
    if instruction.opcode == "fusion":
      body = bodies[called[instruction.name]] - _NO_WORK
      return bool(body) and body <= _MOVES
    return instruction.opcode in _MOVES - _NO_WORK

  return [
    instruction
    for instruction in everything
    if "f8e" in instruction.shape
    and instruction.computation not in fused
    and moves(instruction)
  ]


def ptxas_reports(module: str, tmp_path: Path) -> list[Path]:
  """Runs a test module's `compile_all`, and checks that no kernel spills.

  `compile_all` runs in a new process, in which Mosaic writes the reports of
  ptxas. Returns the folders that `compile_all` made.
  """
  code = (
    "from benchmarks import aot; aot.only_compile(); "
    f"import {module} as t; t.compile_all({str(tmp_path)!r})"
  )
  subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
    check=True,
    timeout=600,
  )
  folders = list(tmp_path.iterdir())
  for folder in folders:
    reports = "".join(path.read_text() for path in folder.glob("*.ptxas"))
    found = re.findall(r"(\d+) bytes spill", reports)
    assert found and set(found) == {"0"}, folder.name
  return folders


def check_wgmma(folder: Path, shape: str = "m64n128k32") -> None:
  """Checks that a kernel uses wgmma, and that ptxas does not serialize it.

  The last number of `shape` is 32 for FP8, and 16 for BF16 and f16.
  """
  [report] = folder.glob("*.ptxas")
  # ptxas warns if it serializes wgmma instructions.
  assert "serialized" not in report.read_text(), folder.name
  [program] = folder.glob("*.ptx")
  assert f"wgmma.mma_async.sync.aligned.{shape}." in program.read_text()
