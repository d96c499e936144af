# SPDX-License-Identifier: Apache-2.0
"""A run on eight devices that is killed, and goes on there or on two."""

import random
import shutil

import jax
import numpy as np
import pytest

from tests.train.runs import losses, programs_on_disk, run, start, wait_for_step
from train import step
from train.run import checkpoint, directory
from train.run.directory import RunDirectory

ON = {count: dict(mesh=f"fsdp={count}") for count in (8, 2)}


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
  """Of processes with so many devices; eight are here too."""
  with programs_on_disk(tmp_path_factory.mktemp("programs")) as environment:
    assert jax.device_count() == 8
    yield {
      count: {**environment, "JAX_NUM_CPU_DEVICES": str(count)} for count in ON
    }


def finish(process):
  output = process.communicate(timeout=300)[0]
  assert process.returncode == 0, output


def each_loss(out, after):
  """Training losses of the steps after one, in order."""
  found = losses(out)
  last = max(number for number, _ in found)
  return np.array([found[i, "loss"] for i in range(after + 1, last + 1)])


def last_state(out):
  """The bytes of a run's last state, and its place in the data."""
  folder = RunDirectory(out)
  number, _ = folder.newest_whole_step()
  description = checkpoint.read_description(folder.checkpoints, number)
  config = directory.configuration(description)
  abstract = step.abstract_state(config, step.build_optimizer(config))
  state = checkpoint.restore_state(folder.checkpoints, number, abstract)
  place = folder.checkpoints / str(number) / "data" / "metadata"
  leaves = zip(step.leaf_names(state), jax.tree.leaves(state), strict=True)
  arrays = {name: np.asarray(leaf).tobytes() for name, leaf in leaves}
  return {**arrays, "data": place.read_bytes()}


@pytest.mark.slow
def test_a_killed_run_goes_on_as_it_would_have(tmp_path, environments):
  options = dict(batch=8, steps=30, save_every=5, eval_every=30, seed=1)
  killed = tmp_path / "killed"
  process = start(killed, environment=environments[8], **options, **ON[8])
  wait_for_step(process, killed, random.Random().randint(6, 22))
  process.kill()
  process.communicate()
  done = RunDirectory(killed).latest_step()
  moved = shutil.copytree(killed, tmp_path / "moved")
  never = {count: tmp_path / f"never-on-{count}" for count in ON}

  # On the same mesh: bit for bit.
  assert run(killed, "--resume", **options, **ON[8]) == 0
  assert run(never[8], **options, **ON[8]) == 0
  assert losses(killed) == losses(never[8])
  assert last_state(killed) == last_state(never[8])

  # On another: the same numbers in sums of another order.
  on_two = dict(environment=environments[2], **options, **ON[2])
  finish(start(never[2], **on_two))
  finish(start(moved, "--resume", **on_two))
  expected = each_loss(never[8], done)
  apart = np.abs(each_loss(moved, done) - expected)
  spread = np.abs(each_loss(never[2], done) - expected)
  print(f"from step {done}: first {apart[0]:.1e}, later {apart.max():.1e};")
  print(
    f"between two runs on 8 and on 2 that were not killed {spread.max():.1e}"
  )
  assert apart[0] <= 1e-5
  assert apart.max() <= spread.max()


@pytest.mark.slow
def test_in_f32_a_run_goes_on_elsewhere_as_it_would_have(
  tmp_path, environments
):
  # Sums of some thousand f32 in another order: about 1e-7 of a loss of 5.
  options = dict(batch=8, steps=40, save_every=10, eval_every=40)
  options |= dict(recipe="bf16", compute="float32", optim__codec="float32")
  out = tmp_path / "out"
  assert run(out, **options, keep=4, **ON[8]) == 0
  moved = shutil.copytree(out, tmp_path / "moved")
  for number in (20, 30, 40):
    shutil.rmtree(moved / "checkpoints" / str(number))
  environment = environments[2]
  finish(start(moved, "--resume", environment=environment, **options, **ON[2]))
  apart = np.abs(each_loss(moved, 10) - each_loss(out, 10))
  assert len(apart) == 30
  print(f"first {apart[0]:.1e}, later {apart.max():.1e}")
  assert apart.max() <= 1e-5
