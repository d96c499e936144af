# SPDX-License-Identifier: Apache-2.0
"""Calls our programs with hundreds of wrong command lines.

  python -m tests.attacks.calls
  python -m tests.attacks.calls --only benchmarks. --limit 60

A wrong call must be refused before the time limit, with an exit status other
than 0 and a message that is not a traceback. It must change no file, not even
one of an earlier run. Nearly all calls are made in this process. The exit
status of this command is 1 if a call was not refused in this way.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.attacks.tables import RUN, bad_calls, make_files
from tests.train.runs import ROOT, run


class TooLong(BaseException):
  """Raised at the time limit; not an Exception, which a command may catch."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of a call."""

  status: object
  output: str
  seconds: float
  changed: list[str]

  @property
  def faults(self) -> list[str]:
    """Returns what is wrong; [] if the call was refused as it should be."""
    found = list(self.changed)
    if self.status == "too long":
      found.append("did not end")
    if "Traceback" in self.output:
      found.append("a traceback")
    if self.status in (0, None):
      found.append("accepted")
    elif not self.output.strip():
      found.append("no text")
    return found


def tree(folder: Path) -> dict[str, str]:
  """Returns the hashes of all files in a folder, by name; "" for folders."""
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
    if path.is_file()
    else ""
    for path in folder.rglob("*")
  }


def call(program: str, arguments: list[str], limit: int) -> tuple[object, str]:
  """Calls a command in this process; returns its exit status and output."""

  def stop(*_):
    raise TooLong

  main = importlib.import_module(program).main
  output = io.StringIO()
  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(limit)
  try:
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
      try:
        status = main(arguments)
        # Benchmarks return their rows, which means success.
        status = status if isinstance(status, int) else 0
      except SystemExit as stopped:
        status = stopped.code
        if isinstance(status, str):
          print(status)
      except TooLong:
        status = "too long"
      except BaseException:
        status = "raised"
        traceback.print_exc()
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
  return status, output.getvalue()


def start(program: str, arguments: list[str], limit: int) -> tuple[object, str]:
  """Calls a command in a new process; returns its exit status and output."""
  try:
    done = subprocess.run(
      [sys.executable, "-m", program, *arguments],
      env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL,
      text=True,
      timeout=limit,
    )
  except subprocess.TimeoutExpired:
    return "too long", ""
  return done.returncode, done.stdout


def attack(
  folder: Path, *, only: str = "", limit: int = 60, every: int = 1
) -> Iterator[tuple[str, Outcome]]:
  """Makes all calls in a folder.

  Args:
    folder: an empty folder, which becomes the working directory.
    only: makes only calls whose command line contains this.
    limit: time limit of a call in seconds.
    every: makes only every n-th call.

  Yields:
    Each command line and its outcome.
  """
  with contextlib.chdir(folder):
    make_files()
    with contextlib.redirect_stderr(io.StringIO()) as errors:
      assert run(RUN, steps=2, save_every=1, eval_batches=1) == 0, errors
    before = tree(folder)
    for i, (program, arguments, is_process) in enumerate(bad_calls()):
      line = " ".join([program, *(x[:40] or "''" for x in arguments)])
      if i % every or only not in line:
        continue
      started = time.monotonic()
      status, output = (start if is_process else call)(
        program, arguments, limit
      )
      took = time.monotonic() - started
      after = tree(folder)
      names = {*before, *after}
      changed = [x for x in sorted(names) if before.get(x) != after.get(x)]
      changed = [f"changed {name}" for name in changed]
      before = after
      yield line, Outcome(status, output, took, changed)


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m tests.attacks.calls")
  parser.add_argument("--only", default="", help="part of a command line")
  parser.add_argument("--limit", type=int, default=60, help="seconds of a call")
  options = parser.parse_args(arguments)
  count, wrong, slowest = 0, 0, (0.0, "")
  started = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    for line, outcome in attack(
      Path(folder), only=options.only, limit=options.limit
    ):
      count += 1
      slowest = max(slowest, (outcome.seconds, line))
      if outcome.faults:
        wrong += 1
        print(f"{line}\n  {'; '.join(outcome.faults)}", flush=True)
        for text in outcome.output.splitlines()[-3:]:
          print(f"    {text[:200]}", flush=True)
  print(
    f"{count} bad calls in {time.monotonic() - started:.0f} s, {wrong} not "
    f"refused as they should be; the slowest took {slowest[0]:.1f} s: "
    f"{slowest[1]}"
  )
  return int(bool(wrong))


if __name__ == "__main__":
  sys.exit(main())
