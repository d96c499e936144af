# SPDX-License-Identifier: Apache-2.0
"""The speed of a run and its time left."""

import json

from train.run import compare, metrics


def test_speed_is_the_median_of_steps(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = [
    dict(step=i + 1, loss=1.0, tokens_per_s=speed)
    for i, speed in enumerate([1.0, 300.0, 310.0, 320.0, 900.0])
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in lines))
  assert (
    compare.summarize(list(metrics.read_metrics(path)))["tokens_per_s"] == 310
  )


def test_time_left_is_estimated_from_the_steps_since_resuming(
  capsys, monkeypatch
):
  now = 1000.0
  monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
  progress = metrics.Progress("run", steps=100, done=40)
  now += 100
  progress.step(60, 1.5, 2000.0)
  progress.close()
  # 20 steps in 100 s; 40 more take 200 s.
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("run: step 60/100, loss 1.5000")
  assert line.endswith(", 03:20 left")
