# SPDX-License-Identifier: Apache-2.0
"""A run that is replaced stays until the new one has a step."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.train.data.streams import numbered
from tests.train.runs import contents
from train.presets import demo
from train.run import replacing
from train.run.description import describe
from train.run.directory import RunDirectory

TOKENS, OTHERS = numbered(1000), numbered(1001)


class Killed(BaseException):
  pass


@pytest.fixture
def run(tmp_path):
  """A run with two checkpoints, a twin, and files that the user added."""
  made = RunDirectory(tmp_path / "run")
  for each in (made, made.twin("bf16_seed_0")):
    each.create(describe(demo(), TOKENS))
    each.metrics.write_text('{"step": 1}\n')
    for step in ("1", "2"):
      (each.checkpoints / step).mkdir(parents=True)
      (each.checkpoints / step / "file").write_text(step)
  for folder in (made.path, made.checkpoints, made.path / "twins"):
    (folder / "notes.txt").write_text("mine")
  return made


def start(run):
  """Replaces a run as a command does, up to its first step."""
  run.create(describe(demo(), OTHERS))
  (run.checkpoints).mkdir(exist_ok=True)
  run.metrics.write_text("")


def test_old_run_is_put_back_whole_if_the_new_one_fails(run, capsys):
  before = contents(run.path)
  start(run)
  assert run.is_run() and not run.is_started()
  run.put_back()
  assert contents(run.path) == before
  assert (
    "put back the old run, which was being replaced" in capsys.readouterr().err
  )
  run.put_back()
  assert contents(run.path) == before


def test_old_run_is_gone_once_the_new_one_has_a_step(run):
  start(run)
  run.remove_replaced()
  run.put_back()
  described = json.loads(run.config.read_text())
  assert described["fingerprint"] == OTHERS.fingerprint
  assert set(contents(run.path)) == {
    *("config.json", "metrics.jsonl"),
    *("notes.txt", "checkpoints/notes.txt", "twins/notes.txt"),
  }


def test_process_killed_at_any_moment_loses_neither_run(
  run, tmp_path, monkeypatch
):
  before = contents(run.path)
  whole = shutil.copytree(run.path, tmp_path / "whole")

  def attempt(moments, act):
    """Runs `act` until it has changed the folder this many times."""
    left = iter(range(moments))

    def counted(call):
      def change(*args, **options):
        if next(left, None) is None:
          raise Killed
        return call(*args, **options)

      return change

    with monkeypatch.context() as patched:
      for owner, name in [
        *((Path, name) for name in ("rename", "mkdir", "rmdir", "unlink")),
        *((Path, "write_text"), (os, "replace"), (shutil, "rmtree")),
      ]:
        patched.setattr(owner, name, counted(getattr(owner, name)))
      try:
        act()
      except Killed:
        return False
    return True

  moments, is_done = 0, False
  while not is_done:
    is_done = attempt(moments, lambda: start(run))
    # The command that repairs it is killed as well.
    recoveries = 0
    while not attempt(recoveries, run.put_back):
      recoveries += 1
    assert contents(run.path) == before, moments
    shutil.rmtree(run.path)
    shutil.copytree(whole, run.path)
    moments += 1
  assert moments > 20


def test_old_run_is_removed_whole_even_if_its_removal_is_killed(
  run, monkeypatch
):
  def killed(*_, **__):
    raise Killed

  start(run)
  with monkeypatch.context() as patched:
    patched.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
      run.remove_replaced()
  run.put_back()
  assert json.loads(run.config.read_text())["fingerprint"] == OTHERS.fingerprint
  assert {path.name for path in run.path.iterdir()} == {
    *("config.json", "metrics.jsonl", "checkpoints", "twins", "notes.txt")
  }


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_next_command_finds_the_old_run_where_it_was(run, flags):
  before = contents(run.path)
  start(run)
  config = dataclasses.replace(demo(), out=str(run.path), **flags)
  if flags:
    with run.claimed(config):
      assert contents(run.path) == before | {"lock": run.lock.read_bytes()}
  else:
    with pytest.raises(
      ValueError, match="already contains a run; pass --resume"
    ):
      with run.claimed(config):
        raise AssertionError
    run.lock.unlink()
    assert contents(run.path) == before


def test_folder_of_the_user_with_that_name_is_left_alone(tmp_path):
  for name in ("replaced_run/checkpoints", "checkpoints/10"):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "thesis.tex").write_text("years of work")
  before = contents(tmp_path)
  assert not replacing.is_aside(tmp_path)
  with pytest.raises(
    ValueError, match="does not contain a run of this program"
  ):
    with RunDirectory(tmp_path).claimed(demo()):
      raise AssertionError
  assert contents(tmp_path) == before
