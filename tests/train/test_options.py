# SPDX-License-Identifier: Apache-2.0
"""Paths in options: unknown users and empty paths."""

from pathlib import Path

import pytest

from tests.train.runs import arguments
from train import plot, pretrain
from train.options import read_path


def test_home_is_expanded_and_other_paths_are_unchanged(monkeypatch):
  monkeypatch.setenv("HOME", "/home/someone")
  assert read_path("out", "~/runs") == Path("/home/someone/runs")
  assert read_path("out", "runs/~x") == Path("runs/~x")


@pytest.mark.parametrize("path", ["", " ", "~nosuchuser", "~nosuchuser/x"])
def test_empty_paths_and_unknown_users_are_reported(path):
  with pytest.raises(ValueError, match="^out: (expected a path|~ must be)"):
    read_path("out", path)


@pytest.mark.parametrize("option", ["out", "data.path", "data.tokenizer"])
def test_path_options_of_a_run_are_checked(
  option, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  for path in ("", "~nosuchuser/x"):
    assert pretrain.main([*arguments("made"), f"--{option}", path]) == 2
    assert f"error: {option}: " in capsys.readouterr().err
  assert not any(tmp_path.iterdir())


def started(folder):
  """Makes a run's folder with one logged step, as `train.plot` requires."""
  folder.mkdir()
  (folder / "config.json").write_text('{"format": "coat_jax run 1"}')
  (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
  return folder


@pytest.mark.parametrize(
  "out, words",
  [
    (".", "got the folder ."),
    ("figure", "ends in .png, .pdf, .svg, got figure;"),
    ("figure.txt", "got figure.txt;"),
    ("none/figure.png", "cannot write to the folder"),
    ("~nosuchuser.png", "~ must be followed by"),
  ],
)
def test_plot_writes_the_requested_file_or_nothing(
  out, words, tmp_path, monkeypatch, capsys
):
  folder = started(tmp_path / "run")
  monkeypatch.chdir(tmp_path)
  assert plot.main([str(folder), "--out", out]) == 2
  assert words in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["run"]
  assert plot.main([str(folder), "--out", "figure.svg"]) == 0
  assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
