# SPDX-License-Identifier: Apache-2.0
"""Draws the contents of memory at each instruction of a compiled step.

  XLA_FLAGS="--xla_dump_to=dump/lean --xla_dump_hlo_as_text" python -c "
  from benchmarks import aot, training_step
  aot.only_compile()
  training_step.compile_step(
    training_step.configure('llama2_7b', 'lean', batch=4, seq=2048)
  )"
  python -m studies.live_ranges dump/minimal dump/lean dump/leanest \\
    --layers 32 --out docs/figures/step_memory.png

The first command compiles one of the steps, and makes XLA write the live range,
size and offset of each array. At each instruction, the sizes of live arrays are
added up; the largest sum is the peak that the compiler reports. A loop appears
once, not once per iteration. Arrays that a loop stacks are live from the loop's
start to its end.

Arguments are weights or optimizer state. All other arrays are classified by
shape:

  gradients    arrays with the shape of a weight
  activations  other arrays that are stacked over layers
  temporary    all remaining arrays
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import arguments as args
from train.plot import check_figure

KINDS = ("weights", "optimizer", "gradients", "activations", "temporary")
_COLORS = ("tab:blue", "tab:cyan", "tab:red", "tab:green", "tab:gray")
_VALUE = re.compile(
  r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_LIVE = re.compile(r"\s+(\S+?)(\{[\d, ]*\}):(\d+)-(\d+)\s*$")


class Timeline(NamedTuple):
  """The memory in use at each instruction of a program.

  Attributes:
    bytes_of: the bytes of each of `KINDS`, float [instructions].
    loops: indices of the instructions at which the largest loops end.
  """

  bytes_of: dict[str, np.ndarray]
  loops: list[int]

  @property
  def peak(self) -> float:
    """The largest number of bytes in use at the same time."""
    return float(np.max(np.sum(list(self.bytes_of.values()), axis=0)))


class _Array(NamedTuple):
  allocation: int
  offset: int
  size: int
  shape: str
  argument: str | None


def read(folder: Path, layers: int) -> Timeline:
  """Reads the timeline of the largest program in an --xla_dump_to folder."""
  found = sorted(
    folder.glob("*-live-range.txt"), key=lambda path: path.stat().st_size
  )
  if not found:
    raise ValueError(
      f"live_ranges: {folder} must contain a file *-live-range.txt, got none; "
      "compile with XLA_FLAGS=--xla_dump_to and --xla_dump_hlo_as_text"
    )
  live = found[-1].read_text()
  name = found[-1].name.replace("-live-range", "-buffer-assignment")
  arrays = _arrays((folder / name).read_text().splitlines())
  count = len(re.findall(r"^    \d+:", live, re.MULTILINE))
  shapes = {
    _dims(x.shape)
    for x in arrays.values()
    if x.argument == "weights" and _dims(x.shape).count(",")
  }
  bytes_of = {kind: np.zeros(count) for kind in KINDS}
  # An array may have several names, so count each memory range only once.
  places: dict[tuple, np.ndarray] = {}
  kinds: dict[tuple, str] = {}
  loops: dict[int, int] = {}
  for line in live.splitlines():
    if "Live ranges at" in line:
      break
    if not (match := _LIVE.match(line)):
      continue
    name, index, start, end = match.groups()
    array = arrays.get(name + (index if index != "{}" else ""))
    if array is None:
      continue
    if name.startswith("while"):
      loops[int(start)] = loops.get(int(start), 0) + array.size
    if array.argument is not None:
      continue
    place = array.allocation, array.offset, array.size
    alive = places.setdefault(place, np.zeros(count, bool))
    alive[int(start) : int(end) + 1] = True
    if place not in kinds or _kind(array, layers, shapes) != "temporary":
      kinds[place] = _kind(array, layers, shapes)
  for place, alive in places.items():
    bytes_of[kinds[place]] += place[2] * alive
  arguments = {x.allocation: x for x in arrays.values() if x.argument}
  for array in arguments.values():
    bytes_of[array.argument or ""] += array.size
  largest = sorted(loops, key=lambda end: loops[end])[-2:]
  return Timeline(bytes_of, sorted(largest))


def draw(timelines: dict[str, Timeline], out: Path) -> None:
  """Draws timelines side by side into a PNG; the keys are their titles."""
  figure = Figure(figsize=(4.2 * len(timelines), 4.2), layout="constrained")
  axes = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
  for ax, (title, line) in zip(axes, timelines.items(), strict=True):
    values = np.stack([line.bytes_of[kind] for kind in KINDS]) / 1e9
    steps = np.arange(values.shape[1])
    ax.stackplot(steps, values, labels=KINDS, colors=_COLORS, step="post")
    ax.axhline(line.peak / 1e9, color="black", linewidth=0.8, linestyle=":")
    for end in line.loops:
      ax.axvline(end, color="black", linewidth=0.8, linestyle="--")
    ax.set_title(f"{title}: {line.peak / 1e9:.1f} GB at the peak")
    ax.set_xlabel("instruction; dashed: a scan over layers ends")
    ax.set_xlim(0, len(steps))
  axes[0].set_ylabel("GB")
  axes[0].margins(y=0.12)
  handles, labels = axes[-1].get_legend_handles_labels()
  axes[-1].legend(handles[::-1], labels[::-1], loc="upper right")
  figure.savefig(out, dpi=110)


def _arrays(lines: Iterable[str]) -> dict[str, _Array]:
  """Reads the allocation, offset and shape of arrays in a buffer assignment."""
  arrays: dict[str, _Array] = {}
  allocation, argument = -1, None
  pending: list[tuple[str, _Array]] = []

  def done():
    # `pending` holds the arrays of one allocation. An argument's allocation
    # holds the argument itself and any arrays that reuse its memory.
    kind = None
    if argument:
      is_weight = any(x.startswith("state_params") for x, _ in pending)
      kind = "weights" if is_weight else "optimizer"
    for name, array in pending:
      arrays[name] = array._replace(argument=kind)
    pending.clear()

  for line in lines:
    if line.startswith("allocation "):
      done()
      allocation = int(line.split()[1].rstrip(":"))
      argument = "parameter" in line
    elif match := _VALUE.match(line):
      name, size, offset, shape = match.groups()
      array = _Array(allocation, int(offset), int(size), shape, None)
      pending.append((name, array))
  done()
  return arrays


def _dims(shape: str) -> str:
  return shape.partition("[")[2].partition("]")[0]


def _kind(array: _Array, layers: int, weights: set[str]) -> str:
  dims = _dims(array.shape)
  if dims in weights:
    return "gradients"
  return "activations" if dims.startswith(f"{layers},") else "temporary"


@args.command
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.live_ranges",
    description=str(__doc__).splitlines()[0],
  )
  parser.add_argument("folders", nargs="+", type=Path)
  parser.add_argument("--layers", type=args.count, required=True)
  parser.add_argument("--out", type=Path, required=True)
  options = parser.parse_args(arguments)
  with args.checked(parser):
    check_figure(options.out)
    lines = {x.name: read(x, options.layers) for x in options.folders}
  draw(lines, options.out)


if __name__ == "__main__":
  main()
