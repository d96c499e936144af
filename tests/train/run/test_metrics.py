# SPDX-License-Identifier: Apache-2.0
"""The log metrics.jsonl, its summary, tables and lines of progress."""

import json
import math
import resource

import pytest

from train.run import compare, metrics, processes
from train.run.writing import SaveError


def write(path, steps, **kwargs):
  log = metrics.MetricsLog(path, **kwargs)
  for step in steps:
    log.write(step=step, loss=1.0 / step, tokens_per_s=100.0)
  log.close()


def steps(path):
  return [row["step"] for row in metrics.read_metrics(path)]


def test_lines_after_the_resumed_step_are_replaced(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, [1, 2, 3, 4, 5])
  write(path, [4, 5, 6], resumed_step=3)
  assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_truncated_line_is_dropped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, [1, 2])
  with path.open("a") as file:
    file.write('{"step": 3, "lo')
  assert steps(path) == [1, 2]
  write(path, [3], resumed_step=2)
  assert steps(path) == [1, 2, 3]


@pytest.mark.parametrize(
  "damaged",
  [b'{"step": \xff}', b'{"st', b"[2]", b"2", b"{}", b'{"step": null}'],
)
def test_only_the_damaged_line_is_dropped(tmp_path, damaged):
  path = tmp_path / "metrics.jsonl"
  write(path, [1, 2, 3])
  lines = path.read_bytes().splitlines()
  lines[1] = damaged
  path.write_bytes(b"\n".join(lines) + b"\n")
  assert steps(path) == [1, 3]
  write(path, [4], resumed_step=3)
  assert steps(path) == [1, 3, 4]


def test_line_is_written_to_disk_at_once(tmp_path):
  log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
  log.write(step=1, loss=2.0)
  assert steps(tmp_path / "metrics.jsonl") == [1]
  log.close()


@pytest.mark.parametrize("is_primary", [True, False])
def test_only_the_first_process_writes_and_prints(
  tmp_path, capsys, monkeypatch, is_primary
):
  monkeypatch.setattr(processes, "is_primary", lambda: is_primary)
  path = tmp_path / "metrics.jsonl"
  write(path, [1, 2])
  assert path.exists() == is_primary
  progress = metrics.Progress("run", steps=2, done=0)
  progress.held_out(1, 2.0)
  progress.close()
  assert bool(capsys.readouterr().err) == is_primary


def test_numbers_that_are_not_finite_become_null(tmp_path):
  log = metrics.MetricsLog(tmp_path / "m.jsonl")
  log.write(step=1, loss=math.nan, grad_norm=math.inf)
  log.close()
  line = (tmp_path / "m.jsonl").read_text()
  assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None}


def test_summary_has_last_losses_and_median_speed(tmp_path):
  log = metrics.MetricsLog(tmp_path / "m.jsonl")
  for step in range(1, 101):
    log.write(step=step, loss=float(step), tokens_per_s=step)
  log.write(step=50, held_out_loss=9.0)
  log.write(step=100, held_out_loss=1.0)
  log.close()
  assert compare.summarize(
    list(metrics.read_metrics(tmp_path / "m.jsonl"))
  ) == {
    "train_loss": pytest.approx(75.5),
    "held_out_loss": 1.0,
    "perplexity": pytest.approx(math.e),
    "tokens_per_s": 50.5,
  }


def test_missing_file_has_no_lines(tmp_path):
  assert list(metrics.read_metrics(tmp_path / "none")) == []


def test_table_is_aligned():
  table = metrics.format_table(["", "a"], [["loss", "1.0"], ["x", "20.0"]])
  assert table.splitlines() == [
    "         a",
    "----  ----",
    "loss   1.0",
    "x     20.0",
  ]


def test_progress_without_a_terminal_is_a_few_plain_lines(capsys, monkeypatch):
  clock = iter(range(1000))
  monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(clock)))
  progress = metrics.Progress("run", steps=60, done=20)
  for step in range(21, 61):
    progress.step(step, 1.5, 2000.0)
  progress.held_out(60, 1.25)
  progress.close()
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) < 6
  assert lines[0].startswith("run: step 31/60, loss 1.5000, 2,000 tokens/s, ")
  assert lines[-1] == "run: step 60/60, held-out 1.2500"


def test_full_disk_raises_an_error_that_names_the_folder(tmp_path):
  log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
  log.write(step=1, text="a" * 19_000)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # The limit leaves room for pytest's own output.
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    for act in (lambda: log.write(step=2, text="a" * 2000), log.close):
      with pytest.raises(SaveError, match=f"could not write {tmp_path}: OS"):
        act()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
