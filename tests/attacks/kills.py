# SPDX-License-Identifier: Apache-2.0
"""Kills training runs at random moments, and checks that they resume exactly.

  python -m tests.attacks.kills --count 100 [--seed 0] [--lean]
  python -m tests.attacks.kills --programs finetune projector decoder

A run has one or two processes. One process or both are killed (SIGKILL, SIGTERM
or SIGINT), and the run is started again with --resume. This is done up to five
times, and the last start trains to the last step. After each kill, the newest
checkpoint must be complete and not older than before, and the next start must
continue from it. At the end, metrics.jsonl, the last checkpoint and the sampled
answers must be bit-identical to those of an uninterrupted run. The exit status
is 0 if all of this is true; otherwise it is 1, and the files are kept in a
folder.

The programs of `tests.attacks.programs` take turns. With --lean, weights are
BF16, and a decoder's optimizer steps in the backward pass.

Processes are forked from a server that has imported everything, and share
compiled programs.
"""

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

import tests.conftest  # noqa: F401, sets how programs are compiled
from tests.attacks.equality import Lost, check_runs
from tests.attacks.programs import PROGRAMS
from train.run import checkpoint
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STEPS = 24
# Evaluate mostly between checkpoints, so that a killed run repeats evaluations.
OPTIONS = dict(batch=4, steps=STEPS, save_every=4, eval_every=3, eval_batches=1)
# Share of kills that come before the first step after a start.
EARLY = 0.3
# If one of two processes was killed, the other is killed GRACE seconds later,
# as a launcher would do.
GRACE, TIMEOUT = 2, 600


def train(name, out, flags, count, index, address, log) -> None:
  """Trains in a new process, one of `count` processes."""
  file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(file, 1)
  os.dup2(file, 2)
  jax.config.update("jax_num_cpu_devices", 1)
  program, options = PROGRAMS[name], OPTIONS
  if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    os.environ |= {
      "JAX_COORDINATOR_ADDRESS": address,
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(index),
    }
    flags = ["--distributed", *flags]
    options = {**options, "mesh": f"fsdp={count}"}
  folder = Path(out).with_name(name)
  sys.exit(program.main(program.line(folder, out, *flags, **options)))


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of run.

  Attributes:
    name: name of the program.
    count: number of processes.
    settings: additional arguments on the command line.
  """

  name: str
  count: int
  settings: tuple[str, ...]

  def __str__(self) -> str:
    return f"{self.name}, {self.count} process(es)"


class Attempt:
  """The processes of one start of a run."""

  def __init__(self, context, out: Path, kind: Kind):
    run, count = RunDirectory(out), kind.count
    self.out, self.before = out, run.latest_step() or 0
    self.metrics = _inode(run.metrics)
    if self.before:
      flags = ["--resume"]
    else:
      flags = ["--overwrite"] if run.path.exists() else []
    flags = [*flags, *kind.settings]
    with socket.socket() as free:
      free.bind(("localhost", 0))
      address = f"localhost:{free.getsockname()[1]}"
    self.logs = [out.with_name(f"{out.name}.{i}.log") for i in range(count)]
    for log in self.logs:
      log.unlink(missing_ok=True)
    self.started = time.monotonic()
    self.processes = [
      context.Process(
        target=train,
        args=(kind.name, out, flags, count, i, address, str(self.logs[i])),
        daemon=True,
      )
      for i in range(count)
    ]
    for process in self.processes:
      process.start()

  def finish(self, seconds: float | None = TIMEOUT) -> bool:
    """Waits for all processes; returns whether they have ended."""
    until = time.monotonic() + seconds
    for process in self.processes:
      process.join(max(until - time.monotonic(), 0))
    return all(process.exitcode is not None for process in self.processes)

  def wait_for_a_step(self) -> bool:
    """Waits for a step; returns False if the run ends first."""
    while not self.finish(0.01):
      # When a run starts, it rewrites metrics.jsonl without unsaved steps.
      is_new = _inode(RunDirectory(self.out).metrics) != self.metrics
      if is_new and _last_step(self.out) > self.before:
        return True
    return False

  def output(self) -> str:
    """Returns the output of the primary process."""
    return self.logs[0].read_text() if self.logs[0].exists() else ""

  def kill(self) -> None:
    for process in self.processes:
      process.kill()
      process.join()

  def fail(self, text: str) -> None:
    self.kill()
    outputs = [log.read_text() for log in self.logs if log.exists()]
    raise Lost("\n".join([text, *outputs]))


@dataclasses.dataclass
class Reference:
  """An uninterrupted run, and the duration of its parts."""

  out: Path
  kind: Kind
  start: float  # Seconds until the first step.
  step: float  # Seconds per step.


def reference(context, out: Path, kind: Kind) -> Reference:
  """Trains twice; the first run compiles, and the second is timed."""
  for _ in range(2):
    shutil.rmtree(out, ignore_errors=True)
    attempt = Attempt(context, out, kind)
    attempt.wait_for_a_step()
    first = time.monotonic()
    if not attempt.finish() or any(p.exitcode for p in attempt.processes):
      attempt.fail("the uninterrupted run failed")
  seconds = (time.monotonic() - first) / STEPS
  return Reference(out, kind, first - attempt.started, seconds)


def attack(context, out: Path, expected: Reference, rng, kills):
  """Kills a run up to `kills` times, and compares the finished run.

  Returns:
    A word for each kill.
  """
  done, count = [], expected.kind.count
  while True:
    is_early, moment = rng.random() < EARLY, rng.random()
    number = rng.choice(SIGNALS)
    victims = rng.choice([[i] for i in range(count)] + [list(range(count))])
    attempt = Attempt(context, out, expected.kind)
    if len(done) == kills:
      seconds = TIMEOUT
    elif is_early:
      seconds = moment * expected.start
    else:
      attempt.wait_for_a_step()
      seconds = moment * expected.step * (STEPS - attempt.before)
    if attempt.finish(seconds):
      break
    if len(done) == kills:
      attempt.fail(f"it hangs, after {done}")
    for victim in victims:
      with contextlib.suppress(ProcessLookupError):
        os.kill(attempt.processes[victim].pid, number)
    _check_kill(attempt, victims)
    done.append(f"{signal.Signals(number).name}@{_last_step(out)}")
  if any(process.exitcode for process in attempt.processes):
    attempt.fail(f"it failed, after {done}")
  _check_start(attempt)
  check_runs(out, expected.out)
  return done


def _inode(file: Path) -> int | None:
  return file.stat().st_ino if file.exists() else None


def _last_step(out: Path) -> int:
  """Returns the last step in a run's metrics."""
  rows = read_metrics(out / "metrics.jsonl")
  return max((row["step"] for row in rows), default=0)


def _check_kill(attempt: Attempt, victims: list[int]) -> None:
  """Checks the files, after the killed processes have ended."""
  for victim in victims:
    attempt.processes[victim].join(TIMEOUT)
    if attempt.processes[victim].exitcode is None:
      attempt.fail("it hangs after a signal")
  attempt.finish(GRACE)
  attempt.kill()
  _check_start(attempt)
  # For Ctrl-C before `main`, Python prints a traceback. If there are two
  # processes, the one that was not killed may fail with a traceback.
  output = attempt.output()
  is_python = output.rstrip().endswith("KeyboardInterrupt")
  if len(attempt.processes) == 1 and "Traceback" in output and not is_python:
    attempt.fail("a traceback")
  run = RunDirectory(attempt.out)
  latest = run.latest_step() or 0
  if latest < attempt.before:
    attempt.fail(f"checkpoint {attempt.before} is gone, {latest} is the newest")
  if latest and checkpoint.newest_whole_step(run.checkpoints) != (latest, []):
    attempt.fail(f"damage: {checkpoint.newest_whole_step(run.checkpoints)}")
  saved = re.search(r"saved step (\d+) of", attempt.output())
  if saved and not int(saved[1]) == latest == _last_step(run.path):
    attempt.fail(f"{saved[0]}, but the newest checkpoint is {latest}")


def _check_start(attempt: Attempt) -> None:
  """Checks that a start continued from the newest checkpoint."""
  resumed = re.search(r"resumed at step (\d+)", attempt.output())
  if resumed and int(resumed[1]) != attempt.before:
    attempt.fail(f"{resumed[0]} instead of {attempt.before}")


def attack_all(
  folder: Path, kinds: list[Kind], total: int, seed: int, workers: int
) -> int:
  """Attacks runs until enough kills are done; returns their number."""
  os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["tests.attacks.programs"])
  for name in {kind.name: None for kind in kinds}:
    (folder / name).mkdir()
    PROGRAMS[name].make(folder / name)
  references = []
  for kind in kinds:
    out = folder / f"uninterrupted_{kind.name}_{kind.count}"
    references.append(each := reference(context, out, kind))
    print(
      f"{kind}, uninterrupted: {each.start:.1f} s until the first step, "
      f"{1e3 * each.step:.0f} ms a step, {STEPS} steps",
      flush=True,
    )
  lock, numbers, done = threading.Lock(), itertools.count(), 0

  def work():
    nonlocal done
    while True:
      with lock:
        left, number = total - done, next(numbers)
        done += min(left, 5)
      if left <= 0:
        return
      expected = references[number % len(references)]
      out = folder / f"run_{number}"
      rng = random.Random(f"{seed} {number}")
      kills = attack(context, out, expected, rng, min(left, 5))
      with lock:
        done += len(kills) - min(left, 5)
        words = " ".join(kills) or "finished before it was killed"
        print(f"{out.name}, {expected.kind}, equal: {words}", flush=True)
      shutil.rmtree(out)

  with ThreadPoolExecutor(workers) as pool:
    for future in [pool.submit(work) for _ in range(workers)]:
      future.result()
  return done


def main(words: list[str] | None = None) -> int:
  """Reads the command line and attacks; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.attacks.kills", description="Kills training runs."
  )
  parser.add_argument("--count", type=int, default=100, help="kills in all")
  parser.add_argument("--seed", type=int, default=0, help="seed of moments")
  parser.add_argument("--workers", type=int, default=2, help="runs at a time")
  parser.add_argument(
    "--lean", action="store_true", help="--params bfloat16 ..."
  )
  parser.add_argument(
    "--programs", nargs="+", choices=PROGRAMS, default=["pretrain"]
  )
  options = parser.parse_args(words)
  folder = Path(tempfile.mkdtemp(prefix="kills."))
  start = time.monotonic()
  try:
    kinds = [
      Kind(name, count, PROGRAMS[name].lean if options.lean else ())
      for name, count in itertools.product(options.programs, (1, 2))
    ]
    done = attack_all(
      folder, kinds, options.count, options.seed, options.workers
    )
  except Lost as lost:
    print(f"{lost}\nseed {options.seed}; what is left is in {folder}")
    return 1
  shutil.rmtree(folder)
  seconds = time.monotonic() - start
  print(f"{done} kills, all runs bit-equal, none lost, {seconds:.0f} s")
  return 0


if __name__ == "__main__":
  sys.exit(main())
