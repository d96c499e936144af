# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: restoring on other devices, and saves that fail."""

import logging
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.train.run.states import (
  abstract_state,
  batches,
  bytes_of,
  random_state,
  save,
)
from train.run import checkpoint, checksums
from train.run.checkpoint import Checkpoints
from train.run.writing import SaveError
from train.step import TrainState

MESHES = ["fsdp=8", "data=2,tensor=2", "", "fsdp=2,tensor=2,data=2"]


@pytest.mark.slow
def test_state_is_restored_on_other_meshes_bit_for_bit(tmp_path):
  state = random_state(abstract_state(MESHES[0]))
  before = bytes_of(state)
  for i, mesh in enumerate(MESHES[1:]):
    save(tmp_path / str(i), state)
    abstract = abstract_state(mesh)
    state = checkpoint.restore_state(tmp_path / str(i), 3, abstract)
    assert bytes_of(state) == before
    for leaf, want in zip(
      jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
    ):
      assert (leaf.dtype, leaf.shape) == (want.dtype, want.shape)
      if mesh:
        assert leaf.sharding == want.sharding
      else:
        assert leaf.sharding.device_set == {jax.devices()[0]}


@pytest.mark.gpu
def test_state_is_restored_on_gpu_and_cpu_bit_for_bit(tmp_path):
  gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
  state = random_state(on_device(abstract_state(""), gpu))
  before = bytes_of(state)
  for device in (cpu, gpu):
    save(tmp_path / device.platform, state)
    abstract = on_device(abstract_state(""), device)
    path = tmp_path / device.platform
    state = checkpoint.restore_state(path, 3, abstract)
    assert bytes_of(state) == before
    for leaf in jax.tree.leaves(state):
      assert leaf.devices() == {device}


def on_device(abstract, device):
  sharding = SingleDeviceSharding(device)
  return jax.tree.map(lambda x: x.update(sharding=sharding), abstract)


def test_state_is_restored_without_the_devices_that_wrote_it(saved, tmp_path):
  path = shutil.copytree(saved[0], tmp_path / "checkpoints")
  files = list(path.rglob("_sharding"))
  for file in files:
    text, count = re.subn(r"cpu:0|TFRT_CPU_0", "cuda:63", file.read_text())
    assert count
    file.write_text(text)
  assert len(files) == 4  # Params and optimizer of two checkpoints.
  state = checkpoint.restore_state(path, 3, abstract_state(""))
  assert bytes_of(state) == bytes_of(saved[1])


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_data_resumes_with_another_number_of_processes(tmp_path, before, after):
  whole = batches()
  for _ in range(5):
    next(whole)
  first = [batches(i, before) for i in range(before)]
  for iterator in first:
    for _ in range(5):
      next(iterator)
  # Only the first process writes its state, but all states are equal.
  assert all(x.get_state() == first[0].get_state() for x in first)
  abstract = abstract_state("")
  save(tmp_path, random_state(abstract), first[0])
  then = [batches(i, after) for i in range(after)]
  for iterator in then:
    checkpoint.restore(tmp_path, 3, abstract, iterator)
  for _ in range(3):
    rows = np.concatenate([next(iterator)["tokens"] for iterator in then])
    np.testing.assert_array_equal(rows, next(whole)["tokens"])


@pytest.mark.parametrize("name", ["7", "4", "000007", "000005"])
def test_renamed_checkpoint_is_not_taken_for_another_step(saved, copied, name):
  (copied / "5").rename(copied / name)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert (found, len(damaged)) == (3, 1)
  assert (
    damaged[0] == f"{copied / name}: contains step 5; rename it to 5 to use it"
  )
  # The run continues from step 3 and can save the later steps again.
  checkpoints = Checkpoints(copied, keep=3)
  checkpoints.set_aside(after=3)
  for number in (4, 5, 7):
    checkpoints.save(number, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (7, [])
  assert (copied / f"{name}.damaged").exists()


def test_file_named_like_a_step_is_not_a_checkpoint(saved, copied):
  (copied / "9").write_text("no checkpoint")
  found, damaged = checkpoint.newest_whole_step(copied)
  assert (
    found == 5 and f"{copied / '9'}: checksums.json is missing" in damaged[0]
  )
  checkpoints = Checkpoints(copied, keep=3)
  checkpoints.set_aside(after=5)
  checkpoints.save(9, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (9, [])


def test_saving_an_earlier_step_raises(saved, copied):
  checkpoints = Checkpoints(copied, keep=3)
  with pytest.raises(SaveError, match="a checkpoint of step 4 or later exists"):
    checkpoints.save(4, saved[1], batches(), {"config": {}})
  checkpoints.close()


@pytest.mark.parametrize("how", ["removed", "renamed", "another"])
def test_removed_folder_is_named_and_not_created_again(saved, tmp_path, how):
  run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
  shutil.copytree(saved[0], run / "checkpoints")
  checkpoints = Checkpoints(run / "checkpoints", keep=3)
  run.rename(elsewhere)
  if how != "renamed":
    shutil.rmtree(elsewhere)
  if how == "another":
    run.mkdir()
  with pytest.raises(SaveError, match=f"{run} was removed or renamed"):
    checkpoints.save(9, saved[1], batches(), {"config": {}})
  with pytest.raises(SaveError, match="removed or renamed"):
    checkpoints.close()
  if how == "renamed":
    path = elsewhere / "checkpoints"
    assert checkpoint.newest_whole_step(path) == (5, [])
  assert not (run / "checkpoints").exists()


def test_later_steps_are_set_aside_and_saved_again(saved, copied):
  checkpoints = Checkpoints(copied, keep=3)
  assert checkpoint.latest_step(copied) == 5
  checkpoints.set_aside(after=3)
  assert checkpoint.latest_step(copied) == 3
  checkpoints.save(5, saved[1], batches(), {"config": {}})
  checkpoints.wait()
  checkpoints.set_aside(after=3)  # 5.damaged exists already.
  checkpoints.save(5, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (5, [])
  names = {folder.name for folder in copied.iterdir()}
  assert names == {"3", "5", "5.damaged"}


def test_checkpoint_of_another_state_is_rejected(saved):
  abstract = abstract_state("")
  params = {"other": jax.ShapeDtypeStruct((3,), jnp.float32)}
  with pytest.raises(ValueError, match="could not read the state in"):
    checkpoint.restore_state(saved[0], 3, abstract._replace(params=params))


def test_failed_save_is_reported_once_and_keeps_earlier_checkpoints(
  copied, monkeypatch
):
  def fail(folder):
    raise OSError(28, "No space left on device")

  state = TrainState(jnp.int32(9), {"w": jnp.ones(3)}, (), ())
  checkpoints = Checkpoints(copied, keep=3)
  monkeypatch.setattr(checksums, "write", fail)
  checkpoints.save(9, state, batches(), {"config": {}})
  words = rf"No space left on device.*which continues from {copied}/5"
  with pytest.raises(SaveError, match=words):
    checkpoints.wait()
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (5, [])


def test_loggers_are_silent_only_while_checkpoints_are_open(tmp_path):
  logger, hook = logging.getLogger("absl"), sys.unraisablehook
  before = logger.level
  checkpoints = Checkpoints(tmp_path, keep=3)
  assert logger.level == logging.CRITICAL != before
  checkpoints.close()
  assert (logger.level, sys.unraisablehook) == (before, hook)


def test_state_of_the_iterator_is_only_its_position():
  """Checks what `imported.create_run` relies on."""
  iterator = batches()
  for count in range(3):
    assert iterator.get_state() == {"next_index": count}
    next(iterator)
