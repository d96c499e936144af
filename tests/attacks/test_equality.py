# SPDX-License-Identifier: Apache-2.0
"""Tests that a comparison of two runs ignores their speed and nothing else."""

import json

import numpy as np
import pytest

from tests.attacks import equality
from train.run.directory import RunDirectory
from train.run.metrics import describe_rows
from train.step import StepMetrics


def write_metrics(folder, *, speed, loss=1.0):
  """Writes the metrics of a step of fine-tuning, as the training loop does."""
  folder.mkdir()
  metrics = StepMetrics(loss, 1.0, 1e-3, np.array([True]), 5, 0.25)
  row = dict(step=1, loss=loss, tokens_per_s=speed)
  line = json.dumps(row | describe_rows(metrics, speed))
  (folder / "metrics.jsonl").write_text(line)
  return folder


def test_runs_that_differ_only_in_speed_are_equal(tmp_path, monkeypatch):
  monkeypatch.setattr(equality, "check_checkpoints", lambda *_: None)
  one = write_metrics(tmp_path / "one", speed=100.0)
  equality.check_runs(write_metrics(tmp_path / "two", speed=90.0), one)
  other = write_metrics(tmp_path / "other", speed=100.0, loss=2.0)
  with pytest.raises(equality.Lost, match="'loss': 2.0"):
    equality.check_runs(other, one)
  RunDirectory(one).samples.write_text("said")
  with pytest.raises(equality.Lost, match="has None instead of 'said'"):
    equality.check_runs(tmp_path / "two", one)
