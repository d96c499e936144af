# SPDX-License-Identifier: Apache-2.0
"""Folders of runs: what may be started, resumed, replaced and removed."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil

import pytest

from tests.train.data.streams import numbered
from train.presets import demo
from train.run.description import describe
from train.run.directory import RunDirectory

TOKENS, OTHERS = numbered(1000), numbered(1001)


def config(**values):
  return dataclasses.replace(demo(), **values)


@pytest.fixture
def run(tmp_path):
  """Makes a run with a step, a twin, and a file that the user added."""
  made = RunDirectory(tmp_path / "run")
  made.create(describe(demo(), TOKENS))
  made.metrics.write_text('{"step": 1}\n')
  (made.path / "notes.txt").write_text("mine")
  twin = made.twin("bf16_seed_0")
  twin.create(describe(demo(), TOKENS))
  twin.metrics.write_text('{"step": 1}\n')
  return made


def contents(path):
  return {
    str(file.relative_to(path)): file.read_bytes()
    for file in path.rglob("*")
    if file.is_file()
  }


def test_new_or_empty_folder_may_be_used(tmp_path):
  RunDirectory(tmp_path / "new").check(config())
  RunDirectory(tmp_path).check(config())


def test_replacing_a_run_requires_overwrite(run):
  before = contents(run.path)
  with pytest.raises(ValueError, match="already contains a run; pass --resume"):
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
def test_folder_without_a_run_is_refused(tmp_path, marker, overwrite):
  (tmp_path / "thesis.tex").write_text("years of work")
  (tmp_path / "checkpoints").mkdir()
  if marker is not None:
    (tmp_path / "config.json").write_text(marker)
  with pytest.raises(
    ValueError, match="does not contain a run of this program"
  ):
    RunDirectory(tmp_path).check(config(overwrite=overwrite))


def test_file_instead_of_a_folder_raises(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="expected a folder, got the file"):
    RunDirectory(tmp_path / "file").check(config(overwrite=True))


def test_resume_without_a_checkpoint_raises(run, tmp_path):
  for folder in (run, RunDirectory(tmp_path / "new")):
    with pytest.raises(ValueError, match="expected a run with a checkpoint in"):
      folder.check(config(resume=True))


def test_overwrite_removes_only_files_of_the_run(run):
  run.create(describe(demo(), OTHERS))
  assert set(contents(run.path)) == {"config.json", "notes.txt"}
  assert json.loads(run.config.read_text())["fingerprint"] == OTHERS.fingerprint


def test_files_that_the_user_added_to_a_run_stay(run):
  checkpoints = "10", "8.damaged", "12.orbax-checkpoint-tmp"
  for name in checkpoints:
    (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / name / "file").write_text("a checkpoint's")
  mine = set()
  for folder in ("checkpoints/best", "twins/other", "twins/bf16_seed_0/mine"):
    (run.path / folder).mkdir()
    (run.path / folder / "file").write_text("mine")
    mine.add(f"{folder}/file")
  run.create(describe(demo(), OTHERS))
  assert set(contents(run.path)) == mine | {"config.json", "notes.txt"}
  run.remove()
  assert set(contents(run.path)) == mine | {"notes.txt"}


def test_run_is_still_recognized_if_its_removal_was_killed(run, monkeypatch):
  def killed(*_):
    raise KeyboardInterrupt

  (run.checkpoints / "10").mkdir(parents=True)
  with monkeypatch.context() as patched:
    patched.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
      run.create(describe(demo(), OTHERS))
  assert run.is_run() and run.latest_step() is None
  run.check(config(overwrite=True))
  run.create(describe(demo(), OTHERS))
  assert set(contents(run.path)) == {"config.json", "notes.txt"}


def test_symbolic_link_is_removed_and_not_followed(run, tmp_path):
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  (elsewhere / "100").write_text("kept")
  run.checkpoints.symlink_to(elsewhere)
  run.remove()
  assert (elsewhere / "100").read_text() == "kept"


def test_claimed_folder_refuses_other_claims(run):
  wanted = config(overwrite=True)
  with run.claimed(wanted):
    for options in (dict(overwrite=True), dict(resume=True), {}):
      with pytest.raises(
        ValueError, match=f"process {os.getpid()} on .* is already"
      ):
        with run.claimed(config(**options)):
          raise AssertionError
    run.create(describe(demo(), OTHERS))
    assert run.lock.exists(), "the lock is not one of the run's files"
    with pytest.raises(
      ValueError, match=f"process {os.getpid()} on .* is already"
    ):
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


def test_folder_with_only_a_stale_lock_may_be_used(tmp_path):
  (tmp_path / "lock").write_text("process 1 on host")
  RunDirectory(tmp_path).check(config())


@pytest.mark.parametrize("overwrite", [True, False])
def test_folder_with_only_half_a_description_may_be_used(tmp_path, overwrite):
  run = RunDirectory(tmp_path)
  (tmp_path / "lock").write_text("process 1 on host")
  (tmp_path / "config.tmp").write_text('{"format": "coa')
  run.check(config(overwrite=overwrite))
  run.create(describe(demo(), TOKENS))
  assert set(contents(tmp_path)) == {"lock", "config.json"}
  (tmp_path / "config.tmp").write_text('{"format": "coa')
  run.remove()
  assert not tmp_path.exists()


def test_failed_write_leaves_the_old_description(monkeypatch, run):
  def full(file):
    raise OSError(errno.ENOSPC, "No space left on device")

  before = contents(run.path)
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    run.write_description(describe(demo(), OTHERS))
  assert contents(run.path) == before


@pytest.fixture
def saved(run):
  """Writes a checkpoint's description into the run."""
  folder = run.checkpoints / "100" / "run"
  folder.mkdir(parents=True)
  description = {"step": 100, **describe(demo(), TOKENS)}
  (folder / "metadata").write_text(json.dumps(description))
  return run


@pytest.mark.parametrize(
  "damage",
  [
    *(b"", b'{"format": "coat', b"\xff\0", None),
    *(b'{"format": "coat_jax rum 1"}', b"[" * 300_000),
  ],
)
def test_run_with_a_damaged_description_is_recognized(saved, damage):
  saved.config.unlink()
  if damage is not None:
    saved.config.write_bytes(damage)
  with pytest.raises(ValueError, match="already contains a run; pass --resume"):
    saved.check(config())
  saved.check(config(resume=True))
  saved.check(config(overwrite=True))
  saved.create(describe(demo(), OTHERS))
  assert set(contents(saved.path)) == {"config.json", "notes.txt"}


def test_description_of_another_program_is_not_a_run(tmp_path):
  run = RunDirectory(tmp_path)
  run.config.write_text('{"format": "another"}')
  with pytest.raises(
    ValueError, match="does not contain a run of this program"
  ):
    run.check(config(overwrite=True))
  with pytest.raises(
    ValueError, match=r"neither .*config.json nor a checkpoint describes"
  ):
    run.check(config(resume=True))


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "fifo"])
def test_lock_that_is_not_a_plain_file_is_refused_and_left_alone(
  tmp_path, run, kind
):
  thesis = tmp_path / "thesis.tex"
  if kind == "link":
    thesis.write_text("years of work")
  if kind in ("link", "dangling"):
    run.lock.symlink_to(thesis)
  elif kind == "folder":
    run.lock.mkdir()
  else:
    os.mkfifo(run.lock)
  with pytest.raises(ValueError, match="expected .*lock to be a plain file"):
    with run.claimed(config(overwrite=True)):
      raise AssertionError
  assert thesis.exists() == (kind == "link")
  assert kind != "link" or thesis.read_text() == "years of work"


def test_link_named_like_a_temporary_file_is_not_followed(tmp_path, run):
  thesis = tmp_path / "thesis.tex"
  thesis.write_text("years of work")
  run.config.with_suffix(".tmp").symlink_to(thesis)
  run.write_description(describe(demo(), OTHERS))
  assert thesis.read_text() == "years of work"
  assert json.loads(run.config.read_text())["fingerprint"] == OTHERS.fingerprint


def test_claim_checks_again_once_it_has_the_lock(monkeypatch, tmp_path):
  run = RunDirectory(tmp_path / "run")
  lock = RunDirectory._lock

  def late(self, opened):
    run.create(describe(demo(), TOKENS))
    run.metrics.write_text('{"step": 1}\n')
    lock(self, opened)

  monkeypatch.setattr(RunDirectory, "_lock", late)
  with pytest.raises(ValueError, match="already contains a run; pass --resume"):
    with run.claimed(config()):
      raise AssertionError
  assert run.is_run()


def test_claim_warns_if_the_file_system_has_no_locks(
  monkeypatch, tmp_path, capsys
):
  def flock(file, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", flock)
  with RunDirectory(tmp_path / "run").claimed(config()):
    pass
  assert "could not be locked (Function not impl" in capsys.readouterr().err
