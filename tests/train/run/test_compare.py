# SPDX-License-Identifier: Apache-2.0
"""The table that compares a run with its twins, for three given results."""

import dataclasses
import json

import pytest

from tests.train.runs import MODEL
from train import plot
from train.presets import demo
from train.run import compare
from train.run.directory import RunDirectory

# Loss of the last steps, held-out loss, tokens per second.
RESULTS = {
  "mine": (2.5, 2.0, 100.0),
  "first": (2.3, 1.5, 300.0),
  "second": (2.4, 1.75, 500.0),
}


@pytest.fixture
def runs(tmp_path, monkeypatch):
  """Writes a run and two twins of 60 steps; steps 1 to 10 have a loss of 9."""
  monkeypatch.setattr(plot, "draw", lambda runs, out: None)
  config = dataclasses.replace(
    demo(), model=dataclasses.replace(demo().model, **MODEL), compare="bf16"
  )
  configs = []
  for seed, (name, (loss, held_out, speed)) in enumerate(RESULTS.items()):
    out = tmp_path / name
    out.mkdir()
    rows = [
      dict(step=i, loss=9.0 if i <= 10 else loss, tokens_per_s=speed)
      for i in range(1, 61)
    ]
    rows.append(dict(step=30, held_out_loss=7.0))
    rows.append(dict(step=60, held_out_loss=held_out))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "metrics.jsonl").write_text(lines)
    if seed:
      config_of = configs[0].bf16_twin(seed=seed - 1, out=str(out))
    else:
      config_of = dataclasses.replace(config, out=str(out))
    configs.append(config_of)
  return configs


def table(text):
  """Returns the cells of each row by its label."""
  lines = [line.split("  ") for line in text.splitlines() if line]
  cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  return {first: rest for first, *rest in cells}


def test_table_has_difference_to_the_first_twin_and_spread_of_twins(
  runs, capsys
):
  compare.finish(runs)
  rows = table(capsys.readouterr().out)
  assert rows["held-out loss"] == ["2.0000", "1.5000", "1.7500"] + [
    "+0.5000",
    "0.2500",
  ]
  assert rows["training loss, mean of last 50 steps"] == [
    *("2.5000", "2.3000", "2.4000"),
    *("+0.2000", "0.1000"),
  ]
  assert rows["tokens/s"] == ["100", "300", "500", "-200", "200"]
  # The perplexities are e^2, e^1.5 and e^1.75.
  assert rows["held-out perplexity"] == [
    *("7.389", "4.482", "5.755"),
    *("+2.907", "1.273"),
  ]
  state = [float(x) for x in rows["optimizer state, bytes/parameter"]]
  assert state[1:3] == [8, 8] and state[4] == 0
  assert 2 < state[0] < 2.3
  assert state[3] == pytest.approx(state[0] - 8, abs=0.011)


def test_differences_are_computed_from_rounded_figures(runs, capsys):
  for run, size in zip(runs, (33_460_000, 61_700_000, 61_700_000), strict=True):
    with open(RunDirectory(run.out).metrics, "a") as file:
      file.write(json.dumps(dict(step=61, step_bytes=size)) + "\n")
  compare.finish(runs)
  row = table(capsys.readouterr().out)["memory of a step, MB per device"]
  # The exact difference, 33.46 - 61.7, would round to -28.
  assert row == ["33", "62", "62", "-29", "0"]


def test_unknown_figure_has_no_row(runs, capsys):
  compare.finish(runs)
  rows = table(capsys.readouterr().out)
  assert "memory of a step, MB per device" not in rows


def test_run_alone_has_no_difference_and_one_twin_has_no_spread(runs, capsys):
  compare.finish(runs[:1])
  assert table(capsys.readouterr().out)["held-out loss"] == ["2.0000"]
  compare.finish(runs[:2])
  rows = table(capsys.readouterr().out)
  assert rows["held-out loss"] == ["2.0000", "1.5000", "+0.5000"]


def test_perplexity_of_a_run_that_diverged_fits_into_the_table(runs, capsys):
  with open(RunDirectory(runs[0].out).metrics, "a") as file:
    file.write('{"step": 61, "held_out_loss": 600.0}\n')
  compare.finish(runs)
  # e^600 is 3.773e260.
  row = table(capsys.readouterr().out)["held-out perplexity"]
  assert row[0] == "3.773e+260" and row[3] == "+3.773e+260"


def test_twins_are_bf16_runs_with_the_same_seed_and_the_next(tmp_path):
  config = dataclasses.replace(
    demo(),
    out=str(tmp_path / "run"),
    seed=3,
    compare="bf16",
    compare_seeds=2,
    optim=dataclasses.replace(demo().optim, b2=0.99, eps=1e-6, group_size=64),
    report_state=True,
  )
  twins = compare.twins(config)
  assert [twin.seed for twin in twins] == [3, 4]
  assert len({config.out, *(twin.out for twin in twins)}) == 3
  for twin in twins:
    assert twin.out.startswith(config.out)
    assert (twin.recipe, twin.optim.codec) == ("bf16", "float32")
    assert not twin.report_state and twin.compare is None
    assert twin.overwrite and not twin.resume
    # All other options are those of the run.
    assert (twin.optim.b2, twin.optim.eps) == (0.99, 1e-6)
    same = ("model", "data", "steps", "batch", "seq", "eval_every", "mesh")
    assert [getattr(twin, name) for name in same] == [
      getattr(config, name) for name in same
    ]
  assert compare.twins(dataclasses.replace(config, compare=None)) == []


def test_training_loss_averages_only_as_many_steps_as_every_run_has(
  runs, capsys
):
  file = RunDirectory(runs[1].out).metrics
  file.write_text("".join(file.read_text().splitlines(keepends=True)[50:]))
  compare.finish(runs)
  rows = table(capsys.readouterr().out)
  assert rows["training loss, mean of last 10 steps"][:2] == [
    "2.5000",
    "2.3000",
  ]
