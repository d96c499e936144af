# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, damaged, out of disk space, or share a folder."""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.runs import (
  ROOT,
  contents,
  losses,
  programs_on_disk,
  run,
  start,
)
from train import convert
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDirectory
from train.step import TrainState

# These tests start programs; make test-all runs them.
pytestmark = pytest.mark.slow

# Saves states in an endless loop. All parameters of a state equal its step.
SAVER = """
import itertools, pathlib, sys
import jax.numpy as jnp
from train.run.checkpoint import Checkpoints
from train.step import TrainState
class Batches:
  def get_state(self):
    return {"next_index": 0}
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=2)
for step in itertools.count(1):
  params = {name: jnp.full((50, 1000), step) for name in "abcd"}
  checkpoints.save(step, TrainState(step, params, (), ()), Batches(), {})
  if step == 3:
    print("saved", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")) as environment:
    # Started processes get as many devices as this one has, so that they can
    # use its compiled programs.
    yield {**environment, "JAX_NUM_CPU_DEVICES": str(jax.device_count())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Trains for 8 steps and saves checkpoints 4 and 8; tests copy the run."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(out) == 0
  return out


@pytest.fixture
def copied(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / "copy")


def saving(path):
  """Returns whether a checkpoint is being written."""
  return any(path.glob("*.orbax-checkpoint-tmp"))


class Batches:
  def get_state(self):
    return {"next_index": 0}


@pytest.fixture
def saver(tmp_path):
  """Starts a process that saves in a loop; yields it and its folder."""
  command = [sys.executable, "-c", SAVER, tmp_path / "saver"]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "saved\n"
    yield process, tmp_path / "saver"
    process.kill()


def test_interrupted_save_leaves_a_whole_checkpoint(saver, tmp_path):
  process, path = saver
  shape = jax.ShapeDtypeStruct((50, 1000), jnp.int32)
  params = dict.fromkeys("abcd", shape)
  abstract = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, (), ())
  wait, amid = random.Random(0), 0
  for i in range(30):
    time.sleep(wait.uniform(0, 0.1))
    # While the process is stopped, its folder is what a kill would leave.
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    left = shutil.copytree(path, tmp_path / str(i))
    process.send_signal(signal.SIGCONT)
    amid += saving(left)
    newest = checkpoint.latest_step(left)
    assert checkpoint.newest_whole_step(left) == (newest, [])
    state = checkpoint.restore_state(left, newest, abstract)
    assert all(np.all(x == newest) for x in state.params.values())
    # The next save succeeds and removes the interrupted one.
    checkpoints = Checkpoints(left, keep=2)
    checkpoints.save(newest + 1, state, Batches(), {})
    checkpoints.close()
    assert not saving(left)
    assert checkpoint.newest_whole_step(left) == (newest + 1, [])
  assert amid >= 10


def start_saving(out, environment):
  """Starts the run of `finished`, saving each step; waits for a checkpoint."""
  options = dict(steps=8, eval_every=4, save_every=1)
  process = start(out, environment=environment, **options)
  while not checkpoint.latest_step(RunDirectory(out).checkpoints):
    assert process.poll() is None, process.communicate()[0]
  return process


def test_run_killed_while_it_saves_resumes_bit_for_bit(
  finished, tmp_path, compiled_once
):
  out = tmp_path / "killed"
  path = RunDirectory(out).checkpoints
  process = start_saving(out, compiled_once)
  while not saving(path):
    assert process.poll() is None, process.communicate()[0]
  process.kill()
  process.communicate()
  assert saving(path)
  assert checkpoint.latest_step(path) < 8
  assert run(out, "--resume") == 0
  assert losses(out) == losses(finished)


def test_damaged_checkpoint_is_reported_and_the_previous_one_resumed(
  finished, copied, capsys
):
  folder = copied / "checkpoints" / "8"
  # Flip a bit of the embedding; Orbax alone would restore it without an error.
  file = max((folder / "params").rglob("d/*"), key=lambda x: x.stat().st_size)
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)
  name = file.relative_to(folder)
  said = f"{folder}: {name} does not match its checksum"
  # The damage is reported even if the previous checkpoint does not fit.
  assert run(copied, "--resume", "--optim.codec", "log8") == 2
  assert said in capsys.readouterr().err
  arguments = ["export-hf", copied, "--out", copied.with_name("exported")]
  assert convert.main([*map(str, arguments)]) == 0
  assert said in capsys.readouterr().err
  assert run(copied, "--resume") == 0
  errors = capsys.readouterr().err
  assert "resumed at step 4" in errors and said in errors
  assert losses(copied) == losses(finished)
  assert checkpoint.newest_whole_step(copied / "checkpoints") == (8, [])
  assert (copied / "checkpoints" / "8.damaged" / name).read_bytes() == data


def test_resume_without_a_whole_checkpoint_changes_nothing(copied, capsys):
  for step in ("4", "8"):
    (copied / "checkpoints" / step / "run" / "metadata").write_text("")
  before = contents(copied)
  assert run(copied, "--resume") == 2
  errors = capsys.readouterr().err
  for step in ("4", "8"):
    assert f"checkpoints/{step}: run/metadata does not match" in errors
  assert contents(copied) == before


@pytest.mark.parametrize(
  "damage",
  ["", '{"format": "coat', '{"format": "coat_jax rum 1"}', "[" * 300_000, None],
)
def test_run_without_its_description_resumes(finished, copied, capsys, damage):
  file = RunDirectory(copied).config
  description = file.read_bytes()
  file.unlink()
  if damage is not None:
    file.write_text(damage)
  before = contents(copied)
  assert run(copied) == 2
  assert (
    "already contains a run; pass --resume to continue"
    in capsys.readouterr().err
  )
  assert contents(copied) == before
  shutil.rmtree(copied / "checkpoints" / "8")
  assert run(copied, "--resume") == 0
  assert losses(copied) == losses(finished)
  assert len(file.read_bytes()) > len(description) // 2
  assert RunDirectory(copied).is_run()


def test_full_disk_ends_the_run_and_keeps_its_checkpoints(
  tmp_path, compiled_once
):
  out = tmp_path / "run"
  run_directory = RunDirectory(out)
  process = start_saving(out, compiled_once)
  # This limit is enough for the log and for half of the parameters.
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
  output = process.communicate(timeout=120)[0]
  assert process.returncode == 1, output
  last = run_directory.checkpoints / str(run_directory.latest_step())
  folder = run_directory.checkpoints
  words = f"error: save: could not write a checkpoint in {folder}: "
  assert words in output and "File too large" in output
  assert f"--resume, which continues from {last}" in output
  assert "Traceback" not in output, output
  found, damaged = checkpoint.newest_whole_step(run_directory.checkpoints)
  assert last.name == str(found) and not damaged
  assert run(out, "--resume") == 0
  assert checkpoint.newest_whole_step(run_directory.checkpoints) == (8, [])


def test_run_is_kept_if_its_replacement_is_killed_while_compiling(
  finished, copied, compiled_once
):
  process = start(copied, "--overwrite", environment=compiled_once, steps=8)
  while "compiling" not in process.stdout.readline():
    assert process.poll() is None
  process.kill()
  process.communicate()
  assert run(copied, "--resume") == 0
  assert losses(copied) == losses(finished)


def test_folder_is_locked_while_a_command_trains_in_it(
  finished, copied, capsys
):
  program = """
import sys
from train.presets import demo
from train.run.directory import RunDirectory
import dataclasses
config = dataclasses.replace(demo(), out=sys.argv[1], resume=True)
with RunDirectory(config.out).claimed(config):
  print("claimed", flush=True)
  sys.stdin.read()
"""
  process = subprocess.Popen(
    [sys.executable, "-c", program, copied],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == "claimed\n"
    before = contents(copied)
    for flags in (["--resume"], ["--overwrite"]):
      assert run(copied, *flags, steps=12) == 2
      errors = capsys.readouterr().err
      assert f"process {process.pid} on {socket.gethostname()} is" in errors
    assert contents(copied) == before
  finally:
    process.kill()  # This releases the lock.
    process.communicate()
  assert run(copied, "--resume") == 0
