# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl with nonsense: the rest is shown."""

import json

import matplotlib.image
import pytest

from tests.train.data.streams import numbered
from tests.train.run.test_compare import runs, table  # noqa: F401
from train import plot
from train.run import compare
from train.run.description import describe
from train.run.directory import RunDirectory
from train.run.rows import read_rows, summarize

GOOD = [dict(step=i, loss=2.0, tokens_per_s=100.0) for i in range(1, 5)]
LEAF = dict(
  encoded=True,
  parameters=4,
  mu=dict(relative_error=0.1),
  nu=dict(relative_error=0.2),
)
REPORT = dict(step=4, state={"w": LEAF}, powers=dict(mu={"16": 3}, nu={}))

# Damaged lines, by the kind of damage.
NONSENSE = {
  "words for a loss": '{"step": 5, "loss": "two", "tokens_per_s": 1.0}',
  "a loss without a step": '{"loss": 2.0}',
  "a list": "[2.0]",
  "a number": "3",
  "null": "null",
  "no JSON": '{"step": 5, "los',
  "not UTF-8": b'{"step": 5, "loss": "\xff"}',
  "brackets": "[" * 200_000,
  "a huge number": '{"step": 5, "loss": 1e300}',
  "too long a number": '{"step": 5, "loss": ' + "9" * 400 + "}",
  "no finite number": '{"step": 5, "loss": Infinity}',
  "a huge step": '{"step": ' + "9" * 400 + ', "loss": 2.0}',
  "words for a step": '{"step": "five", "loss": 2.0}',
  "a negative step": '{"step": -5, "loss": 2.0}',
  "a truth": '{"step": 5, "loss": true}',
  "a list for held out": '{"step": 5, "held_out_loss": [1]}',
  "words for a state": '{"step": 5, "state": "good"}',
  "words for a leaf": '{"step": 5, "state": {"w": "good"}}',
  "a leaf with nothing": '{"step": 5, "state": {"w": {}}}',
  "no error": '{"step": 5, "state": {"w": {"encoded": true}}}',
  "no parameters": json.dumps(
    dict(step=5, state={"w": LEAF | {"parameters": 0}})
  ),
  "a list of powers": '{"step": 5, "powers": [1]}',
  "unknown moments": '{"step": 5, "powers": {"xi": {"16": 1}}}',
  "words for a power": '{"step": 5, "powers": {"mu": {"k": 1}}}',
  "words for a count": '{"step": 5, "powers": {"mu": {"16": "1"}}}',
  "negative counts": '{"step": 5, "powers": {"mu": {"16": -1}}}',
}


def as_bytes(line):
  return line if isinstance(line, bytes) else line.encode()


def write(path, *lines):
  path.write_bytes(b"".join(as_bytes(line) + b"\n" for line in lines))


def good(*rows):
  return [json.dumps(row) for row in (*GOOD, REPORT, *rows)]


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_left_out_and_reported(name, tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = good()
  lines.insert(2, NONSENSE[name])
  write(path, *lines)
  found = read_rows(path)
  assert found.damaged == (
    f"{path}: 1 line with invalid values, which were left out; "
    "restore the file from a copy to include them"
  )
  kept = [row for row in found.rows if row.keys() > {"step"}]
  assert [row for row in kept if row["step"] != 5] == [*GOOD, REPORT]
  assert summarize(kept)["train_loss"] == 2.0


def test_null_and_a_line_that_a_kill_cut_short_are_not_damage(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(
    path, *good(dict(step=5, loss=None, grad_norm=None, held_out_loss=None))
  )
  with path.open("a") as file:
    file.write('{"step": 6, "lo')
  found = read_rows(path)
  assert found.damaged is None
  assert found.rows[-1] == {"step": 5}
  assert read_rows(tmp_path / "none") == ([], None)


def test_nothing_but_nonsense_is_drawn_and_summarized_as_nothing(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, *NONSENSE.values())
  rows, damaged = read_rows(path)
  assert f"{len(NONSENSE)} lines" in damaged
  plot.draw({"run": rows}, tmp_path / "plot.png")
  summary = summarize(rows)
  assert "train_loss" not in summary and "held_out_loss" not in summary


def test_final_table_and_figure_survive_nonsense(runs, capsys, monkeypatch):  # noqa: F811
  monkeypatch.undo()  # The picture is drawn here.
  folder = RunDirectory(runs[1].out)
  lines = folder.metrics.read_bytes().splitlines()
  held_out = [line for line in lines if b"held_out_loss" not in line]
  write(folder.metrics, *held_out, *NONSENSE.values())
  compare.finish(runs)
  output, errors = capsys.readouterr()
  assert f"{folder.metrics}: {len(NONSENSE)} lines with invalid" in errors
  cells = table(output)
  assert cells["held-out loss"] == ["2.0000", "none", "1.7500", "none", "none"]
  assert cells["training loss, mean of last 50 steps"][1] == "2.3000"
  picture = matplotlib.image.imread(RunDirectory(runs[0].out).plot)
  assert picture.shape[0] == 600


def test_plot_command_draws_the_rest(runs, capsys):  # noqa: F811
  folder = RunDirectory(runs[0].out)
  folder.write_description(describe(runs[0], numbered(1000)))
  write(folder.metrics, *good(), *NONSENSE.values())
  assert plot.main([str(folder.path)]) == 0
  output, errors = capsys.readouterr()
  assert output.strip() == str(folder.plot)
  assert f"{len(NONSENSE)} lines with invalid values" in errors
