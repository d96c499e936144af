# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: where they can be restored, and that damage is reported."""

import dataclasses
import json
import logging
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from train import step
from train.data.batches import train_iterator
from train.data.tokens import TokenSource
from train.mesh import make_mesh, parse_mesh
from train.presets import demo
from train.run import checkpoint, checksums
from train.run.checkpoint import Checkpoints, SaveError
from train.step import TrainState

MESHES = ["fsdp=8", "fsdp=2", "", "data=2,tensor=2", "fsdp=2,tensor=2,data=2"]


def config(codec="coat"):
  """A model that all of `MESHES` can split, in groups that they split too."""
  model = dict(num_layers=2, d_model=64, d_ff=128, num_heads=2, num_kv_heads=2)
  return dataclasses.replace(
    demo(),
    model=dataclasses.replace(demo().model, **model),
    optim=dataclasses.replace(demo().optim, group_size=32, codec=codec),
    batch=8,
    seq=32,
    report_state=False,
  )


def abstract_state(mesh):
  sizes = parse_mesh(mesh)
  count = int(np.prod(list(sizes.values()) or [1]))
  mesh = make_mesh(sizes, jax.devices()[:count])
  return step.abstract_state(config(), step.build_optimizer(config()), mesh)


def random_state(abstract):
  """Any bytes, NaNs too: nothing may depend on what they mean."""
  rng = np.random.default_rng(0)

  def fill(leaf):
    bytes_ = rng.bytes(leaf.size * leaf.dtype.itemsize)
    x = np.frombuffer(bytes_, leaf.dtype).reshape(leaf.shape)
    return jax.device_put(x, leaf.sharding)

  state = jax.tree.map(fill, abstract)
  number = jax.device_put(jnp.int32(3), abstract.step.sharding)
  return state._replace(step=number)


def bytes_of(state):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def batches(index=0, count=1):
  tokens = TokenSource(
    name="numbers",
    parts=[np.arange(5000, dtype=np.uint16) % 251],
    vocab_size=256,
    held_out=0.1,
  )
  return train_iterator(
    tokens,
    seq_len=32,
    batch_size=4,
    seed=0,
    process_index=index,
    process_count=count,
  )


def save(path, state, iterator=None, step=3, **options):
  checkpoints = Checkpoints(path, keep=3)
  checkpoints.save(step, state, iterator or batches(), {"config": {}})
  checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Two checkpoints; tests copy them before they damage them."""
  path = tmp_path_factory.mktemp("checkpoints")
  state = random_state(abstract_state(""))
  for number in (3, 5):
    save(path, state, step=number)
  return path, state


@pytest.fixture
def copied(saved, tmp_path):
  return shutil.copytree(saved[0], tmp_path / "checkpoints")


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
  assert len(files) == 4  # Of params and optimizer, in two checkpoints.
  state = checkpoint.restore_state(path, 3, abstract_state(""))
  assert bytes_of(state) == bytes_of(saved[1])


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_data_resume_with_any_number_of_processes(tmp_path, before, after):
  whole = batches()
  for _ in range(5):
    next(whole)
  first = [batches(i, before) for i in range(before)]
  for iterator in first:
    for _ in range(5):
      next(iterator)
  # Orbax has the first process write it; any has the same to write.
  assert all(x.get_state() == first[0].get_state() for x in first)
  abstract = abstract_state("")
  save(tmp_path, random_state(abstract), first[0])
  then = [batches(i, after) for i in range(after)]
  checkpoints = Checkpoints(tmp_path, keep=3)
  for iterator in then:
    checkpoints.restore(3, abstract, iterator)
  checkpoints.close()
  for _ in range(3):
    rows = np.concatenate([next(iterator)["tokens"] for iterator in then])
    np.testing.assert_array_equal(rows, next(whole)["tokens"])


def damages(data):
  """Yields damaged versions of a file: other bytes, or None for no file."""
  rng = np.random.default_rng(len(data))
  for place in rng.integers(len(data), size=5):
    flipped = bytearray(data)
    flipped[place] ^= 1 << rng.integers(8)
    yield bytes(flipped)
  yield from (data[: len(data) * 2 // 3], b"", data + b"\0", None)


@pytest.mark.slow
def test_damage_of_any_file_selects_the_checkpoint_before(
  copied,
):
  late = {"_CHECKPOINT_METADATA", "commit_success.txt"}
  folder = copied / "5"
  names = [
    file.relative_to(folder).as_posix()
    for file in folder.rglob("*")
    if file.is_file()
  ]
  kinds = {re.sub("[0-9a-f]{32}", "*", name) for name in names}
  for item in ("params", "optimizer"):
    for kind in ("manifest.ocdbt", "d/*", "ocdbt.process_0/d/*", "_METADATA"):
      assert f"{item}/{kind}" in kinds
  assert {"data/metadata", "run/metadata", "checksums.json"} | late < kinds
  assert checkpoint.newest_whole_step(copied) == (5, [])
  for name in set(names) - late:
    data = (folder / name).read_bytes()
    for damaged in damages(data):
      (folder / name).unlink()
      if damaged is not None:
        (folder / name).write_bytes(damaged)
      found, damages_found = checkpoint.newest_whole_step(copied)
      assert found == 3, name
      # A damaged checksum is reported as damage of the file.
      assert len(damages_found) == 1 and str(folder) in damages_found[0]
      assert name in damages_found[0] or name == checksums.NAME
    (folder / name).write_bytes(data)
  assert checkpoint.newest_whole_step(copied) == (5, [])


@pytest.mark.parametrize("text", ["{}", "[]", '["run/metadata"]', "null", "1"])
def test_checksums_without_files_are_damage(copied, text):
  (copied / "5" / checksums.NAME).write_text(text)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert found == 3
  assert damaged == [f"{copied / '5'}: checksums.json names no files"]


def test_deeply_nested_checksums_are_damage(copied):
  (copied / "5" / checksums.NAME).write_text("[" * 300_000)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert found == 3 and "checksums.json cannot be read" in damaged[0]


@pytest.mark.parametrize(
  "name",
  [
    *("/dev/zero", "../3/run/metadata", "run/../../3/run/metadata", "outside"),
    *("link", "fifo", "run", "a\0b", "/etc/hostname"),
  ],
)
def test_checksums_of_what_is_no_file_of_the_checkpoint_are_damage(
  copied, tmp_path, name
):
  file = copied / "5" / checksums.NAME
  if name == "outside":
    name = str(tmp_path / name)
    shutil.copy(copied / "5" / "run" / "metadata", name)
  if name == "link":
    (copied / "5" / name).symlink_to(copied / "3" / "run" / "metadata")
  if name == "fifo":
    os.mkfifo(copied / "5" / name)
  digest = json.loads(file.read_text())["run/metadata"]
  for named in ({name: digest}, {"run/metadata": digest, name: digest}):
    file.write_text(json.dumps(named))
    found, damaged = checkpoint.newest_whole_step(copied)
    assert found == 3
    words = "cannot be read" if "\0" in name else "is no file of the checkpoint"
    assert words in damaged[0]


@pytest.mark.parametrize("name", ["7", "4", "000007", "000005"])
def test_renamed_checkpoint_is_not_taken_for_another_step(saved, copied, name):
  (copied / "5").rename(copied / name)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert (found, len(damaged)) == (3, 1)
  assert damaged[0] == f"{copied / name}: is of step 5; rename it 5 to use it"
  # The run goes on, and its later steps are saved where that one was.
  checkpoints = Checkpoints(copied, keep=3)
  checkpoints.set_aside(after=3)
  for number in (4, 5, 7):
    checkpoints.save(number, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (7, [])
  assert (copied / f"{name}.damaged").exists()


def test_file_by_the_name_of_a_step_is_no_checkpoint(saved, copied):
  (copied / "9").write_text("no checkpoint")
  found, damaged = checkpoint.newest_whole_step(copied)
  assert found == 5 and f"{copied / '9'}: checksums.json cannot" in damaged[0]
  checkpoints = Checkpoints(copied, keep=3)
  checkpoints.set_aside(after=5)
  checkpoints.save(9, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (9, [])


def test_step_before_one_that_is_there_is_not_left_out_silently(saved, copied):
  checkpoints = Checkpoints(copied, keep=3)
  with pytest.raises(SaveError, match="has a later step than 4"):
    checkpoints.save(4, saved[1], batches(), {"config": {}})
  checkpoints.close()


@pytest.mark.parametrize("how", ["removed", "renamed", "another"])
def test_folder_that_is_gone_is_named_and_not_made_anew(saved, tmp_path, how):
  run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
  shutil.copytree(saved[0], run / "checkpoints")
  checkpoints = Checkpoints(run / "checkpoints", keep=3)
  run.rename(elsewhere)
  if how != "renamed":
    shutil.rmtree(elsewhere)
  if how == "another":
    run.mkdir()
  with pytest.raises(SaveError, match=f"{run} must stay .* removed or renamed"):
    checkpoints.save(9, saved[1], batches(), {"config": {}})
  with pytest.raises(SaveError, match="removed or renamed"):
    checkpoints.close()
  if how == "renamed":
    path = elsewhere / "checkpoints"
    assert checkpoint.newest_whole_step(path) == (5, [])
  assert not (run / "checkpoints").exists()


# Orbax says that it cannot read its own file.
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "commit_success.txt"])
def test_files_without_a_checksum_are_not_needed(saved, copied, name):
  for damaged in damages((copied / "5" / name).read_bytes()):
    (copied / "5" / name).unlink(missing_ok=True)
    if damaged is not None:
      (copied / "5" / name).write_bytes(damaged)
    assert checkpoint.newest_whole_step(copied) == (5, [])
    checkpoints = Checkpoints(copied, keep=3)
    state = checkpoints.restore(5, abstract_state(""), batches())
    checkpoints.close()
    assert state.step == 5
    assert bytes_of(state)[1:] == bytes_of(saved[1])[1:]


def test_error_names_all_checkpoints_where_none_is_whole(copied):
  for number in (3, 5):
    (copied / str(number) / "run" / "metadata").write_text("{}")
  with pytest.raises(
    ValueError, match=r"5: run/metadata is not .*3: run/metadata is not"
  ):
    checkpoint.newest_whole_step(copied)


def test_steps_after_a_damaged_one_are_set_aside_and_saved_again(saved, copied):
  checkpoints = Checkpoints(copied, keep=3)
  assert checkpoints.latest_step() == 5
  checkpoints.set_aside(after=3)
  assert checkpoints.latest_step() == 3
  checkpoints.save(5, saved[1], batches(), {"config": {}})
  checkpoints.wait()
  checkpoints.set_aside(after=3)  # There is one aside already.
  checkpoints.save(5, saved[1], batches(), {"config": {}})
  checkpoints.close()
  assert checkpoint.newest_whole_step(copied) == (5, [])
  names = {folder.name for folder in copied.iterdir()}
  assert names == {"3", "5", "5.damaged"}


def test_checkpoint_of_another_state_is_rejected(saved):
  abstract = abstract_state("")
  params = {"other": jax.ShapeDtypeStruct((3,), jnp.float32)}
  with pytest.raises(ValueError, match="must hold the state of this run, got"):
    checkpoint.restore_state(saved[0], 3, abstract._replace(params=params))


def test_failed_save_is_reported_once_and_leaves_earlier_ones(
  copied, monkeypatch
):
  def fail(folder):
    raise OSError(28, "No space left on device")

  state = TrainState(jnp.int32(9), {"w": jnp.ones(3)}, (), ())
  checkpoints = Checkpoints(copied, keep=3)
  monkeypatch.setattr(checksums, "write", fail)
  checkpoints.save(9, state, batches(), {"config": {}})
  words = rf"No space left on device.*which goes on from {copied}/5"
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


def test_state_of_the_iterator_is_its_place_alone():
  """What `convert` relies on, where there is no iterator to ask."""
  iterator = batches()
  for count in range(3):
    assert iterator.get_state() == {"next_index": count}
    next(iterator)
