# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints in many ways, and checks that training notices.

  python -m tests.attacks.damage [--resume 20] [--seed 0] [--every 1]
  python -m tests.attacks.damage --program decoder

A run has two checkpoints, of which the newer one is damaged. Each of its files
is truncated, emptied, removed, swapped, or replaced by a folder, a link or a
device, or gets a flipped bit. Whole checkpoints are renamed and swapped too.
(With --every 4, only every fourth damage of a file is tried.) In each case, the
damage must be reported, unless it changed nothing that is read. In 20 random
cases (--resume 20), the program, one of `tests.attacks.programs`, is resumed,
and must end with the same result as the undamaged run. The exit status is 0 if
all of this is true.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tests.conftest  # noqa: F401, sets how programs are compiled
from tests.attacks.equality import Lost, check_checkpoints, check_runs
from tests.attacks.programs import PROGRAMS, Program
from tests.train.runs import contents, programs_on_disk
from train.run import checkpoint, checksums

BEFORE, NEWEST = "4", "8"
OPTIONS = dict(steps=8, save_every=4, eval_every=4, eval_batches=1)
Damage = Callable[[Path], object]
Case = tuple[str, Damage]


def damages_of_file(name: str, rng: random.Random) -> Iterator[Case]:
  """Yields ways to damage one file of the newest checkpoint."""

  def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path):
      file = path / NEWEST / name
      file.write_bytes(change(file.read_bytes()))

    return damage

  def replaced(put: Callable[[Path, Path], object]) -> Damage:
    def damage(path: Path):
      file, aside = path / NEWEST / name, path.with_name("aside")
      file.rename(aside)
      put(file, aside)

    return damage

  def flip(data: bytes) -> bytes:
    if not data:
      return b"\0"
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)

  yield "truncated", rewritten(lambda data: data[: len(data) * 2 // 3])
  yield "emptied", rewritten(lambda data: b"")
  yield "lengthened", rewritten(lambda data: data + b"\0")
  yield "zeroed", rewritten(lambda data: bytes(len(data)))
  for i in range(5):
    yield f"a bit flipped ({i})", rewritten(flip)
  yield "removed", replaced(lambda file, aside: None)
  yield "a folder", replaced(lambda file, aside: file.mkdir())
  yield (
    "moved, with a link in its place",
    replaced(lambda file, aside: file.symlink_to(aside)),
  )
  yield (
    "a link to a device",
    replaced(lambda file, aside: file.symlink_to("/dev/zero")),
  )
  yield "a link to itself", replaced(lambda file, aside: file.symlink_to(file))
  yield "a pipe", replaced(lambda file, aside: os.mkfifo(file))


def exchange(one: Path, other: Path) -> None:
  aside = one.with_name("exchanged")
  one.rename(aside)
  other.rename(one)
  aside.rename(other)


def damages_of_files(path: Path, rng: random.Random) -> Iterator[Case]:
  """Yields ways to damage or swap each file of the newest checkpoint."""
  names = sorted(contents(path / NEWEST))
  for name in names:
    for words, damage in damages_of_file(name, rng):
      yield f"{name}: {words}", damage
  for name in names:
    other = rng.choice([each for each in names if each != name])
    yield (
      f"{name}: exchanged with {other}",
      lambda path, name=name, other=other: exchange(
        path / NEWEST / name, path / NEWEST / other
      ),
    )
    if (path / BEFORE / name).exists():
      yield (
        f"{name}: replaced by that of step {BEFORE}",
        lambda path, name=name: shutil.copy(
          path / BEFORE / name, path / NEWEST / name
        ),
      )


def damages_of_checkpoints() -> Iterator[Case]:
  """Yields ways to damage whole checkpoints."""
  for name in ("15", "5", "000008", "8.bak", "08"):
    yield (
      f"renamed to {name}",
      lambda path, name=name: (path / NEWEST).rename(path / name),
    )
  yield (
    "copied as 12",
    lambda path: shutil.copytree(path / NEWEST, path / "12"),
  )
  yield "exchanged", lambda path: exchange(path / BEFORE, path / NEWEST)
  for item in ("params", "optimizer", "data", "run"):
    yield (
      f"{item} removed",
      lambda path, item=item: shutil.rmtree(path / NEWEST / item),
    )
    yield (
      f"{item} exchanged with that of step {BEFORE}",
      lambda path, item=item: exchange(
        path / BEFORE / item, path / NEWEST / item
      ),
    )

  def replaced(put: Callable[[Path], object]) -> Damage:
    def damage(path: Path):
      shutil.rmtree(path / NEWEST)
      put(path / NEWEST)

    return damage

  yield "emptied", replaced(lambda folder: folder.mkdir())
  yield "a file", replaced(lambda folder: folder.write_text(""))
  yield (
    "a link to the one before",
    replaced(lambda folder: folder.symlink_to(BEFORE)),
  )
  yield "a link to nothing", replaced(lambda folder: folder.symlink_to("no"))
  texts = ("{}", "[]", "null", "[" * 300_000, '{"/dev/zero": ""}')
  for text in (*texts, '{"../4/run/metadata": ""}', '{"run/metadata": 1}'):
    yield (
      f"{checksums.NAME} with {text[:30]}",
      lambda path, text=text: (path / NEWEST / checksums.NAME).write_text(text),
    )


def check(path: Path, original: Path) -> str:
  """Checks which checkpoint is found among damaged ones.

  Returns:
    The text that was reported.

  Raises:
    Lost: the checkpoint that was found is damaged, or has another step.
  """
  try:
    found, damaged = checkpoint.newest_whole_step(path)
  except ValueError as error:
    if str(error).startswith("checkpoints: all in"):
      return "no checkpoint is whole"
    raise
  whole = str(found)
  if whole not in (BEFORE, NEWEST):
    raise Lost(f"step {found} was found")
  if whole != NEWEST and not damaged and (path / NEWEST).exists():
    raise Lost(f"step {found} was found, and no damage reported")
  if contents(path / whole) != contents(original / whole):
    check_checkpoints(path / whole, original / whole)
  return "; ".join(damaged) or f"step {found} is whole"


def attack(
  folder: Path, program: Program, resumed: int, seed: int, every: int
) -> None:
  """Damages copies of a run.

  Raises:
    Lost: a damaged checkpoint was used, or a run ended with a different result.
  """

  def run(out: Path, *flags: str) -> int:
    return program.main(program.line(folder, out, *flags, **OPTIONS))

  program.make(folder)
  expected = folder / "undamaged"
  if run(expected):
    raise Lost("the undamaged run failed")
  original = expected / "checkpoints"
  rng = random.Random(seed)
  of_files = [*damages_of_files(original, rng)][::every]
  cases = [*damages_of_checkpoints(), *of_files]
  chosen = set(rng.sample(range(len(cases)), min(resumed, len(cases))))
  whole = 0
  for i, (words, damage) in enumerate(cases):
    out = folder / "damaged"
    shutil.copytree(expected, out)
    damage(out / "checkpoints")
    try:
      report = check(out / "checkpoints", original)
      whole += report == f"step {NEWEST} is whole"
      if i in chosen and report != "no checkpoint is whole":
        if run(out, "--resume"):
          raise Lost("it could not be resumed")
        check_runs(out, expected)
        print(f"{words}: resumed", flush=True)
    except Exception as error:
      raise Lost(f"{words}: {error!r}") from error
    shutil.rmtree(out)
  print(
    f"{len(cases)} damages, 0 trained on, 0 wrong steps; in {whole} of them "
    f"nothing that is read was damaged"
  )


def main(words: list[str] | None = None) -> int:
  """Reads the command line and attacks; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.attacks.damage", description="Damages checkpoints."
  )
  parser.add_argument("--resume", type=int, default=20, help="cases to resume")
  parser.add_argument("--seed", type=int, default=0, help="seed of damages")
  parser.add_argument("--every", type=int, default=1, help="every n-th damage")
  parser.add_argument("--program", choices=PROGRAMS, default="pretrain")
  options = parser.parse_args(words)
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="damage.") as folder:
    folder = Path(folder)
    with programs_on_disk(folder / "programs"):
      try:
        program = PROGRAMS[options.program]
        attack(folder, program, options.resume, options.seed, options.every)
      except Lost as lost:
        print(f"{lost}\nseed {options.seed}")
        return 1
  print(f"{time.monotonic() - start:.0f} s")
  return 0


if __name__ == "__main__":
  sys.exit(main())
