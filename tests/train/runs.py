# SPDX-License-Identifier: Apache-2.0
"""A run of a few seconds, for tests of the commands."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from train import pretrain
from train.run.metrics import read_metrics

ROOT = Path(__file__).parent.parent.parent

MODEL = dict(num_layers=2, d_model=64, d_ff=128, num_heads=2, num_kv_heads=1)
# Some leaves have at least 4096 values, so the codec encodes them.
OPTIONS = {
  **{f"model.{name.replace('_', '-')}": value for name, value in MODEL.items()},
  "batch": 2,
  "seq": 32,
  "eval-batches": 2,
  "optim.warmup": 2,
  "steps": 8,
  "eval-every": 4,
  "save-every": 4,
}
# Long enough that tests can stop the run before it ends.
LONG = dict(steps=120, eval_every=30, save_every=20)


def arguments(out, *flags, **options):
  """Returns a tiny run's command line; `optim__lr=1` is `--optim.lr 1`."""
  options = {
    name.replace("__", ".").replace("_", "-"): value
    for name, value in options.items()
  }
  line = ["demo", "--out", str(out), *flags]
  for name, value in {**OPTIONS, **options}.items():
    line += [f"--{name}", str(value)]
  return line


def run(out, *flags, **options):
  """Trains in this process; returns the exit status."""
  try:
    return pretrain.main(arguments(out, *flags, **options))
  except SystemExit as exit:  # raised by tyro
    return exit.code


def start(out, *flags, environment, **options):
  """Starts a long run in a separate process; returns the process."""
  command = [sys.executable, "-m", "train.pretrain"]
  return subprocess.Popen(
    command + arguments(out, *flags, **{**LONG, **options}),
    cwd=ROOT,
    env={**os.environ, "PYTHONWARNINGS": "error", **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def wait_for_step(process, out, step):
  """Waits until a started run has logged a step."""
  while process.poll() is None:
    rows = list(read_metrics(Path(out) / "metrics.jsonl"))
    if rows and rows[-1]["step"] >= step:
      return
    time.sleep(0.005)
  raise AssertionError(process.communicate()[0])


def contents(path):
  """Returns the bytes of all files below a folder, by name."""
  return {
    str(file.relative_to(path)): file.read_bytes()
    for file in Path(path).rglob("*")
    if file.is_file()
  }


def losses(out):
  """Returns a run's logged losses, norms and moment reports by (step, name)."""
  rows = list(read_metrics(Path(out) / "metrics.jsonl"))
  keys = ("loss", "held_out_loss", "grad_norm", "state", "powers")
  return {
    (row["step"], key): row[key] for row in rows for key in keys if key in row
  }


@contextlib.contextmanager
def programs_on_disk(folder):
  """Caches compiled programs in a folder, for all runs of a test module.

  If there is a cache already, as in `make test`, uses it instead of the folder,
  because other modules and processes of the suite have filled it.

  Yields the environment variables with which processes use the same cache.
  """
  options = {
    "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir
    or str(folder),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield {name.upper(): str(value) for name, value in options.items()}
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
