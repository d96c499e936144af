# SPDX-License-Identifier: Apache-2.0
"""A run on eight devices is killed, and resumed on eight devices or on two."""

import shutil

import jax
import numpy as np
import pytest

from tests.train.runs import losses, programs_on_disk, run, start, wait_for_step
from train import step
from train.run import checkpoint
from train.run.description import configuration
from train.run.directory import RunDirectory

ON = {count: dict(mesh=f"fsdp={count}") for count in (8, 2)}


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
  """Yields environments of processes with 8 and with 2 devices."""
  with programs_on_disk(tmp_path_factory.mktemp("programs")) as environment:
    assert jax.device_count() == 8
    yield {
      count: {**environment, "JAX_NUM_CPU_DEVICES": str(count)} for count in ON
    }


def finish(process):
  output = process.communicate(timeout=300)[0]
  assert process.returncode == 0, output


def each_loss(out, after):
  """Returns the training losses of the steps after `after`, in order."""
  found = losses(out)
  last = max(number for number, _ in found)
  return np.array([found[i, "loss"] for i in range(after + 1, last + 1)])


def last_state(out):
  """Returns the bytes of a run's last state, and its place in the data."""
  folder = RunDirectory(out)
  number, _ = checkpoint.newest_whole_step(folder.checkpoints)
  description = checkpoint.read_description(folder.checkpoints, number)
  config = configuration(description)
  abstract = step.abstract_state(config, step.build_optimizer(config))
  state = checkpoint.restore_state(folder.checkpoints, number, abstract)
  place = folder.checkpoints / str(number) / "data" / "metadata"
  leaves = zip(step.leaf_names(state), jax.tree.leaves(state), strict=True)
  arrays = {name: np.asarray(leaf).tobytes() for name, leaf in leaves}
  return {**arrays, "data": place.read_bytes()}


@pytest.mark.slow
def test_killed_run_resumes_on_its_mesh_and_on_another(tmp_path, environments):
  options = dict(batch=8, steps=14, save_every=4, eval_every=14, seed=1)
  killed = tmp_path / "killed"
  process = start(killed, environment=environments[8], **options, **ON[8])
  wait_for_step(process, killed, 10)  # This is between two checkpoints.
  process.kill()
  process.communicate()
  done = RunDirectory(killed).latest_step()
  moved = shutil.copytree(killed, tmp_path / "moved")
  never = tmp_path / "never"

  # On the same mesh, the resumed run is bit-identical to the uninterrupted one.
  assert run(killed, "--resume", **options, **ON[8]) == 0
  assert run(never, **options, **ON[8]) == 0
  assert losses(killed) == losses(never)
  assert last_state(killed) == last_state(never)

  # On another mesh, the first loss differs only by the summation order. Later,
  # values between two codes may get other codes. (The f32 run of the next test
  # has no codes.)
  on_two = dict(environment=environments[2], **options, **ON[2])
  finish(start(moved, "--resume", **on_two))
  apart = np.abs(each_loss(moved, done) - each_loss(never, done))
  assert apart[0] <= 1e-5


@pytest.mark.slow
def test_run_in_f32_resumed_on_another_mesh_has_the_same_losses(
  tmp_path, environments
):
  # A different order of summing some thousand f32 values changes a loss by 1e-7
  # of its value.
  options = dict(batch=8, steps=10, save_every=4, eval_every=10)
  options |= dict(recipe="bf16", compute="float32", optim__codec="float32")
  out = tmp_path / "out"
  assert run(out, **options, keep=3, **ON[8]) == 0
  moved = shutil.copytree(out, tmp_path / "moved")
  for number in (8, 10):
    shutil.rmtree(moved / "checkpoints" / str(number))
  environment = environments[2]
  finish(start(moved, "--resume", environment=environment, **options, **ON[2]))
  apart = np.abs(each_loss(moved, 4) - each_loss(out, 4))
  assert len(apart) == 6
  assert apart.max() <= 1e-5
