# SPDX-License-Identifier: Apache-2.0
"""Folders of runs: what may be started, resumed, replaced and removed."""

import dataclasses
import errno
import fcntl
import functools
import json
import os

import pytest

from train.presets import demo
from train.run import directory
from train.run.directory import RunDirectory


def config(**values):
  return dataclasses.replace(demo(), **values)


@pytest.fixture
def run(tmp_path):
  """A run with a step, a twin, and a file of the user's."""
  made = RunDirectory(tmp_path / "run")
  made.create(directory.describe(demo(), "tokens"))
  made.metrics.write_text('{"step": 1}\n')
  (made.path / "notes.txt").write_text("mine")
  twin = made.twin("bf16_seed_0")
  twin.create(directory.describe(demo(), "tokens"))
  twin.metrics.write_text('{"step": 1}\n')
  return made


def contents(path):
  return {
    str(file.relative_to(path)): file.read_bytes()
    for file in path.rglob("*")
    if file.is_file()
  }


def test_new_or_empty_folder_is_free(tmp_path):
  RunDirectory(tmp_path / "new").check(config())
  RunDirectory(tmp_path).check(config())


def test_run_is_replaced_only_when_asked(run):
  before = contents(run.path)
  with pytest.raises(ValueError, match="holds a run; pass --resume"):
    run.check(config())
  run.check(config(overwrite=True))
  assert contents(run.path) == before


def test_run_without_a_step_may_be_replaced(run):
  run.metrics.unlink()
  run.check(config())


@pytest.mark.parametrize(
  "marker", [None, "", "{}", "[]", '{"format": "another"}', '{"format": 1}']
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_folder_without_a_run_is_left_alone(tmp_path, marker, overwrite):
  (tmp_path / "thesis.tex").write_text("years of work")
  (tmp_path / "checkpoints").mkdir()
  if marker is not None:
    (tmp_path / "config.json").write_text(marker)
  with pytest.raises(ValueError, match="no run of this program, so it is left"):
    RunDirectory(tmp_path).check(config(overwrite=overwrite))


def test_file_in_place_of_the_folder_raises(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="needs a folder, got the file"):
    RunDirectory(tmp_path / "file").check(config(overwrite=True))


def test_resume_without_a_checkpoint_raises(run, tmp_path):
  for folder in (run, RunDirectory(tmp_path / "new")):
    with pytest.raises(ValueError, match="hold a run with a checkpoint, got"):
      folder.check(config(resume=True))


def test_overwrite_removes_only_files_of_the_run(run):
  run.create(directory.describe(demo(), "other tokens"))
  assert set(contents(run.path)) == {"config.json", "notes.txt"}
  assert json.loads(run.config.read_text())["fingerprint"] == "other tokens"


def test_removing_a_twin_leaves_other_folders_in_twins(run):
  other = run.path / "twins" / "other"
  other.mkdir()
  (other / "file").write_text("mine")
  run.remove()
  assert set(contents(run.path)) == {"twins/other/file", "notes.txt"}


def test_symbolic_link_is_removed_and_not_followed(run, tmp_path):
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  (elsewhere / "100").write_text("kept")
  run.checkpoints.symlink_to(elsewhere)
  run.remove()
  assert (elsewhere / "100").read_text() == "kept"


def compare(
  monkeypatch, run, before, now, fingerprint="tokens", convert_state=False
):
  saved = json.loads(json.dumps(directory.describe(before, "tokens")))
  monkeypatch.setattr(
    directory.checkpoint, "read_description", lambda path, step: saved
  )
  return directory.check_same(
    run,
    100,
    directory.describe(now, fingerprint),
    convert_state=convert_state,
  )


def test_same_run_may_be_resumed(monkeypatch, run):
  same = config(resume=True, keep=1, compare="bf16", eval_every=7)
  assert compare(monkeypatch, run, demo(), same) == []


def test_options_newer_than_the_checkpoint_have_their_defaults(
  monkeypatch, run
):
  def older(path, step):
    del path, step
    description = directory.describe(demo(), "data")
    del description["config"]["model"]["clip_qkv"]
    del description["config"]["remat"]
    return description

  monkeypatch.setattr(directory.checkpoint, "read_description", older)
  check = functools.partial(directory.check_same, run, 100, convert_state=False)
  assert check(directory.describe(demo(), "data")) == []
  model = dataclasses.replace(demo().model, clip_qkv=8.0)
  with pytest.raises(ValueError, match="model.clip_qkv: None -> 8.0"):
    check(directory.describe(config(model=model), "data"))


def test_allowed_changes_are_reported(monkeypatch, run):
  optim = dataclasses.replace(demo().optim, lr=5e-4)
  now = config(steps=300, optim=optim)
  changes = compare(monkeypatch, run, demo(), now)
  assert changes == ["optim.lr: 0.001 -> 0.0005", "steps: 200 -> 300"]


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(recipe="bf16"), "recipe: coat -> bf16"),
    (dict(residuals="coat"), "residuals: minimal -> coat"),
    (dict(seed=1), "seed: 0 -> 1"),
    (dict(batch=8), "batch: 4 -> 8"),
    (
      dict(model=dataclasses.replace(demo().model, d_ff=64)),
      "model.d_ff: 352 -> 64",
    ),
    (
      dict(optim=dataclasses.replace(demo().optim, codec="log8")),
      "optim.codec: coat -> log8",
    ),
  ],
)
def test_checkpoint_of_another_run_is_rejected(monkeypatch, run, values, words):
  with pytest.raises(ValueError, match=f"checkpoints/100 is .*{words}"):
    compare(monkeypatch, run, demo(), config(**values))


def test_checkpoint_of_other_data_is_rejected(monkeypatch, run):
  with pytest.raises(ValueError, match="data: other tokens"):
    compare(monkeypatch, run, demo(), demo(), fingerprint="others")


def test_codec_may_change_only_with_convert_state(monkeypatch, run):
  optim = dataclasses.replace(
    demo().optim, second="e5m2", rounding="nearest", group_size=64
  )
  now = config(optim=optim, resume=True, convert_state=True)
  with pytest.raises(ValueError, match="e4m3 -> e5m2; pass --convert-state"):
    compare(monkeypatch, run, demo(), now)
  changes = compare(monkeypatch, run, demo(), now, convert_state=True)
  assert sorted(changes) == [
    "optim.group_size: 128 -> 64",
    "optim.rounding: stochastic -> nearest",
    "optim.second: e4m3 -> e5m2",
  ]
  other = dataclasses.replace(now, seed=1)
  with pytest.raises(ValueError, match="seed: 0 -> 1.*; pass what it was"):
    compare(monkeypatch, run, demo(), other, convert_state=True)


def test_description_gives_the_configuration_back():
  made = config(steps=7, batch=8)
  described = directory.describe(made, "tokens")
  saved = json.loads(json.dumps(described))
  assert directory.configuration(saved) == made


def test_folder_is_claimed_while_it_is_entered(run):
  wanted = config(overwrite=True)
  with run.claimed(wanted):
    with pytest.raises(ValueError, match=f"got process {os.getpid()} on"):
      with run.claimed(wanted):
        raise AssertionError
    run.create(directory.describe(demo(), "other tokens"))
    assert run.lock.exists(), "it is not one of the run's files"
    with pytest.raises(ValueError, match=f"got process {os.getpid()} on"):
      with run.claimed(wanted):
        raise AssertionError
  with run.claimed(wanted):
    pass
  assert run.is_run()


def test_claimed_folder_is_removed_if_no_run_is_created(tmp_path):
  run = RunDirectory(tmp_path / "run")
  with run.claimed(config()):
    assert run.lock.exists()
  assert not run.path.exists()


def test_folder_with_only_a_stale_lock_is_free(tmp_path):
  (tmp_path / "lock").write_text("process 1 on host")
  RunDirectory(tmp_path).check(config())


@pytest.mark.parametrize("overwrite", [True, False])
def test_folder_with_only_half_a_description_is_free(tmp_path, overwrite):
  run = RunDirectory(tmp_path)
  (tmp_path / "lock").write_text("process 1 on host")
  (tmp_path / "config.tmp").write_text('{"format": "coa')
  run.check(config(overwrite=overwrite))
  run.create(directory.describe(demo(), "tokens"))
  assert set(contents(tmp_path)) == {"lock", "config.json"}
  (tmp_path / "config.tmp").write_text('{"format": "coa')
  run.remove()
  assert not tmp_path.exists()


def test_failed_write_leaves_the_description_before(monkeypatch, run):
  def full(file):
    raise OSError(errno.ENOSPC, "No space left on device")

  before = contents(run.path)
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    run.write_description(directory.describe(demo(), "other tokens"))
  assert contents(run.path) == before


@pytest.fixture
def saved(run):
  """The run with what a checkpoint says about it."""
  folder = run.checkpoints / "100" / "run"
  folder.mkdir(parents=True)
  description = {"step": 100, **directory.describe(demo(), "tokens")}
  (folder / "metadata").write_text(json.dumps(description))
  return run


@pytest.mark.parametrize("damage", [b"", b'{"format": "coat', b"\xff\0", None])
def test_run_with_a_damaged_description_is_a_run(saved, damage):
  saved.config.unlink()
  if damage is not None:
    saved.config.write_bytes(damage)
  with pytest.raises(ValueError, match="holds a run; pass --resume"):
    saved.check(config())
  saved.check(config(resume=True))
  saved.check(config(overwrite=True))
  saved.create(directory.describe(demo(), "other tokens"))
  assert set(contents(saved.path)) == {"config.json", "notes.txt"}


def test_description_of_another_program_is_no_run(saved):
  saved.config.write_text('{"format": "another"}')
  with pytest.raises(ValueError, match="no run of this program, so it is left"):
    saved.check(config(overwrite=True))
  with pytest.raises(ValueError, match=r"got .*config.json that is of no run"):
    saved.check(config(resume=True))


def test_claim_checks_again_once_it_has_the_lock(monkeypatch, tmp_path):
  run = RunDirectory(tmp_path / "run")
  lock = RunDirectory._lock

  def late(self, opened):
    run.create(directory.describe(demo(), "tokens"))
    run.metrics.write_text('{"step": 1}\n')
    lock(self, opened)

  monkeypatch.setattr(RunDirectory, "_lock", late)
  with pytest.raises(ValueError, match="holds a run; pass --resume"):
    with run.claimed(config()):
      raise AssertionError
  assert run.is_run()


def test_claim_without_locks_in_the_file_system_warns(
  monkeypatch, tmp_path, capsys
):
  def flock(file, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", flock)
  with RunDirectory(tmp_path / "run").claimed(config()):
    pass
  assert "without a lock (Function not impl" in capsys.readouterr().err
