# SPDX-License-Identifier: Apache-2.0
"""Bad lines of metrics.jsonl are skipped."""

import json

import pytest

from tests.train.data.streams import numbered
from tests.train.run.test_compare import runs, table  # noqa: F401
from train import plot
from train.run import compare
from train.run.description import describe
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

GOOD = [dict(step=i, loss=2.0, tokens_per_s=100.0) for i in range(1, 5)]

NONSENSE = {
  "a loss without a step": b'{"loss": 2.0}',
  "a list": b"[2.0]",
  "null": b"null",
  "truncated JSON": b'{"step": 5, "los',
  "not UTF-8": b'{"step": 5, "loss": "\xff"}',
  "words for a step": b'{"step": "five", "loss": 2.0}',
}


def write(path, *lines):
  path.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize("name", NONSENSE)
def test_bad_line_is_skipped(name, tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = [json.dumps(row).encode() for row in GOOD]
  lines.insert(2, NONSENSE[name])
  write(path, *lines)
  assert list(read_metrics(path)) == GOOD


def test_null_values_are_skipped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, b'{"step": 5, "loss": null, "lr": 0.5}')
  assert list(read_metrics(path)) == [dict(step=5, lr=0.5)]
  assert list(read_metrics(tmp_path / "none")) == []


def test_table_and_plot_use_the_valid_lines(runs, capsys, monkeypatch):  # noqa: F811
  monkeypatch.undo()  # The fixture replaced plot.draw.
  folder = RunDirectory(runs[1].out)
  lines = folder.metrics.read_bytes().splitlines()
  held_out = [line for line in lines if b"held_out_loss" not in line]
  write(folder.metrics, *held_out, *NONSENSE.values())
  compare.finish(runs)
  cells = table(capsys.readouterr().out)
  assert cells["held-out loss"] == ["2.0000", "none", "1.7500", "none", "none"]
  assert cells["training loss, mean of last 50 steps"][1] == "2.3000"

  folder.write_description(describe(runs[1], numbered(1000)))
  assert plot.main([str(folder.path)]) == 0
  assert capsys.readouterr().out.strip() == str(folder.plot)


def test_run_without_valid_lines_is_not_plotted(runs, capsys):  # noqa: F811
  folder = RunDirectory(runs[1].out)
  folder.write_description(describe(runs[1], numbered(1000)))
  write(folder.metrics, *NONSENSE.values())
  assert plot.main([str(folder.path)]) == 2
  assert "must have lines with a step, got none" in capsys.readouterr().err
