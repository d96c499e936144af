# SPDX-License-Identifier: Apache-2.0
"""Counts the GPU instructions of an optimizer's kernel, without a GPU.

  PATH=$PATH:DIR PYTHONPATH=.:.venv/compiler python -m benchmarks.instructions
    [--codecs coat log8] [--weights float32 bfloat16 bfloat16_low8]
    [--optimizer coat_lion]

DIR must contain nvdisasm, NVIDIA's disassembler, from the wheel
nvidia-cuda-nvdisasm or from a CUDA toolkit. Each fused step is compiled for an
H200 (`benchmarks.aot`) and disassembled. A thread of the kernel processes 8
values of a tile. If warpgroups take turns (`pallas.mosaic.turns`), the counts
are those of a turn, without the start of the program. One of four warps also
starts the copies for the next turn. Each of these instructions counts as a
quarter. Codecs with a factored second moment are left out, because their step
has two kernels.

The command prints a JSON row, `optimizer.instructions`, for each combination of
codec, rounding and weight format:

  instructions  number of instructions per value
  by_kind       number of instructions per value, for each kind in `KINDS`
  hash          number of instructions per value that compute random words
  registers     number of registers per thread
  warps         number of warps that fit on a multiprocessor with this number of
                registers per thread
  clocks        number of clocks that each pipe needs to process one value per
                thread of a warp; `issue` is the number of clocks needed to
                issue the instructions. The largest number is a lower bound on
                the time. The numbers follow from the throughputs in NVIDIA's
                CUDA C++ Programming Guide for compute capability 9.0.
"""

import argparse
import collections
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax

from benchmarks import aot
from benchmarks import arguments as args
from benchmarks.harness import emit, say
from benchmarks.optimizer import OPTIMIZERS, WEIGHTS, cases, has_kernel
from coat_jax.optimizer.step import is_factored
from coat_jax.pallas.mosaic import words

VALUES = 8  # Number of values per thread; see `pallas.mosaic.registers`.
SHAPE = (2048, 1024)

# Maps each kind of instruction to (clocks, opcode prefixes). A quarter of a
# multiprocessor needs this number of clocks to execute one instruction of a
# warp. An instruction belongs to the first kind with a matching prefix.
KINDS = {
  "special": (8, ("MUFU", "F2I", "I2F.", "F2F", "FRND", "POPC", "FLO")),
  "shuffle": (4, ("SHFL",)),
  "memory": (4, ("LD", "ST", "RED", "ATOM")),
  "uniform": (1, ("U", "R2UR", "S2UR")),
  "multiply-add": (1, ("FFMA", "FMUL", "FADD", "IMAD", "HADD", "HFMA", "HMUL")),
  "convert": (2, ("F2FP", "I2FP")),
  "integer, compare": (
    2,
    (
      *("LOP", "PLOP", "SHF", "SHL", "SHR", "LEA", "IADD", "VI", "IABS", "SEL"),
      *("ISETP", "IMNMX", "PRMT", "SGXT", "BMSK", "BREV", "FMNMX", "FSEL"),
      *("FSETP", "FCHK", "FSET", "VABSDIFF", "HMNMX", "HSET", "P2R", "R2P"),
    ),
  ),
  "other": (1, ("",)),
}
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][\w.]*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_REGISTERS_OF_SM = 65536
# The share of warps that execute instructions that a branch skips.
_SHARE = 0.25


class DisassemblerMissing(aot.CompilerMissing):
  """Raised if nvdisasm is not found."""


def disassembler() -> Path:
  """Returns the CUDA root for Mosaic: the folder with bin/nvdisasm."""
  found = shutil.which("nvdisasm")
  if found is None:
    raise DisassemblerMissing(
      "instructions: nvdisasm must be on the PATH, got none; install the wheel "
      "nvidia-cuda-nvdisasm into a folder (pip install --target), and add the "
      "folder's nvidia/cu13/bin to the PATH"
    )
  return Path(found).resolve().parents[1]


def opcodes(listing: str) -> collections.Counter[str]:
  """Counts the instructions in nvdisasm's listing, by opcode.

  If the listing has a loop, counts those of one turn. An instruction that a
  branch skips counts as a quarter.
  """
  lines = listing.splitlines()
  labels = {
    found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))
  }
  branches = [
    (i, labels[found[1]])
    for i, line in enumerate(lines)
    if (found := _BRANCH.search(line))
  ]
  # A listing ends with a branch to itself, which is padding.
  loops = [range(to, i + 1) for i, to in branches if to + 1 < i]
  if loops:
    # Loops that wait for barriers begin later.
    turn = min(loops, key=lambda loop: loop.start)
  else:
    turn = range(next(i for i, line in enumerate(lines) if "EXIT" in line))
  skipped = [range(i + 1, to) for i, to in branches if i in turn and to in turn]
  total: collections.Counter[str] = collections.Counter()
  for i in turn:
    for opcode in _LINE.findall(lines[i]):
      share = _SHARE if any(i in part for part in skipped) else 1
      total[opcode] += share  # pyright: ignore[reportArgumentType]
  del total["NOP"]
  return total


def kind_of(opcode: str) -> str:
  """Returns the kind in `KINDS` to which an instruction belongs."""
  for kind, (_, starts) in KINDS.items():
    if opcode.startswith(starts):
      return kind
  raise AssertionError(opcode)


def by_kind(found: collections.Counter[str]) -> dict[str, float]:
  """Computes the number of instructions per value, by kind."""
  out = dict.fromkeys(KINDS, 0.0)
  for opcode, count in found.items():
    out[kind_of(opcode)] += count / VALUES
  return out


def clocks(found: collections.Counter[str]) -> dict[str, float]:
  """Computes the row's `clocks` from the instructions of a thread."""
  per_value = by_kind(found)
  out = {kind: per_value[kind] * cost for kind, (cost, _) in KINDS.items()}
  # Only one half of the multiply-add pipe multiplies integers.
  whole = sum(
    count for opcode, count in found.items() if opcode.startswith("IMAD")
  )
  out["multiply-add"] = max(out["multiply-add"], 2 * whole / VALUES)
  # Conversions run on the same pipe as integer instructions and comparisons.
  out["integer, compare"] += out.pop("convert")
  return out | {"issue": sum(per_value.values())}


@contextlib.contextmanager
def _dump() -> Iterator[Path]:
  """Yields a temporary folder, to which Mosaic writes machine code."""
  # On import, Mosaic sets its CUDA root to the folder that JAX finds, which may
  # not contain nvdisasm.
  with tempfile.TemporaryDirectory() as folder:
    variables = {
      "MOSAIC_GPU_CUDA_ROOT": str(disassembler()),
      "MOSAIC_GPU_DUMP_TO": folder,
      "MOSAIC_GPU_DUMP_PTXAS": "1",
      "MOSAIC_GPU_DUMP_SASS": "1",
    }
    with mock.patch.dict(os.environ, variables):
      yield Path(folder)


def compile_step(
  name: str, codec, kind: str, *, mixed: bool = True
) -> tuple[collections.Counter[str], int]:
  """Compiles a fused step; returns its instructions and registers.

  If `mixed` is false, the step leaves out the hash that computes random words.
  """
  dtype, low_bits = WEIGHTS[kind]
  optimizer = OPTIMIZERS[name][0](
    1e-3,
    codec=codec,
    weight_decay=0.1,
    low_bits=low_bits,
    implementation="mosaic",
  )
  p = jax.ShapeDtypeStruct(SHAPE, dtype)
  state = jax.eval_shape(optimizer.init, p)
  jax.clear_caches()  # Otherwise JAX would reuse a compiled step.
  mix = words.mix if mixed else (lambda word: word)
  with _dump() as folder, mock.patch.object(words, "mix", mix):
    aot.compile_for_h200(
      lambda p, s, g: optimizer.apply(g, s, p), p, state, p, donate=(0, 1)
    )
    [listing] = folder.glob("*.sass*")
    [report] = folder.glob("*.ptxas")
    [registers] = re.findall(r"Used (\d+) registers", report.read_text())
    return opcodes(listing.read_text()), int(registers)


def row(name: str, key: tuple[str, str], codec, kind: str) -> dict:
  """Compiles a step and prints its row."""
  found, registers = compile_step(name, codec, kind)
  unmixed, _ = compile_step(name, codec, kind, mixed=False)
  # Registers are allocated to a warp in units of 256, and a warpgroup has four
  # warps.
  of_warpgroup = -(-registers // 8) * 8 * 32 * 4
  total = found.total() / VALUES
  busy = clocks(found)
  case = dict(codec=key[0], rounding=key[1], dtype=kind)
  case |= {} if name == "coat_adamw" else dict(optimizer=name)
  per_value, mixing = by_kind(found), total - unmixed.total() / VALUES
  warps = _REGISTERS_OF_SM // of_warpgroup * 4
  out = emit(
    "optimizer.instructions",
    case | dict(compiled_for="NVIDIA H200"),
    instructions=total,
    hash=mixing,
    by_kind=per_value,
    clocks=busy,
    registers=registers,
    warps=warps,
  )
  most = max(busy, key=lambda name: busy[name])
  kinds = ", ".join(f"{k} {v:.1f}" for k, v in per_value.items() if v)
  say(
    f"{' '.join(case.values()):32s} {total:6.1f} per value, hash "
    f"{mixing:.1f} | {kinds} | clocks: issue {busy['issue']:.0f}, "
    f"{most} {busy[most]:.0f} | {registers} registers, {warps} warps "
    "per multiprocessor"
  )
  return out


@args.command
def main(arguments: list[str] | None = None) -> None:
  """Reads the command line, compiles and counts."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--codecs", nargs="+", help="names of codecs; default: all codecs"
  )
  parser.add_argument(
    "--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS)
  )
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="coat_adamw")
  options = parser.parse_args(arguments)
  with args.checked(parser):
    chosen = cases(options.codecs)
  disassembler()
  aot.only_compile()
  for key, codec in chosen.items():
    if is_factored(codec.groups):
      continue
    if not has_kernel(options.optimizer, codec, SHAPE, "float32"):
      continue
    for kind in options.weights:
      row(options.optimizer, key, codec, kind)


if __name__ == "__main__":
  main()
