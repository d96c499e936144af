# SPDX-License-Identifier: Apache-2.0
"""Tests the stability study: rows, cases left to run, and a toy run."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from coat_jax.numerics.formats import E4M3
from studies import stability, stability_figure, stability_run
from studies.rows import read_rows
from train import step
from train.data.tokens import DataConfig, load_tokens

RNG = np.random.default_rng(0)


def losses(count=200):
  return list(
    5 * np.exp(-np.arange(count) / 60) + 1 + RNG.normal(0, 0.01, count)
  )


def describe(x):
  return stability_run.describe(x, [1.0] * len(x), warmup=20)


def test_losses_decide_whether_a_run_failed_and_had_spikes():
  x = losses()
  found = describe(x)
  assert (found["failed"], found["spikes"]) == (None, 0)
  assert found["train_loss"] == pytest.approx(np.mean(x[-50:]))
  assert len(found["losses"]) == 8
  assert found["losses"][-1] == pytest.approx(np.mean(x[-25:]), rel=1e-3)
  # There are two spikes, one of which lasts two steps; spikes in the warmup do
  # not count.
  for at in (10, 120, 121, 160):
    x[at] += 3
  assert describe(x)["spikes"] == 2
  # A run diverged if its mean loss ends more than half a nat above its best.
  worse = [*losses(150), *([2.6] * 100)]
  found = describe(worse)
  assert found["failed"] == "diverged" and 150 < found["failed_at"] < 250
  assert describe([*losses(150), *([2.0] * 100)])["failed"] is None
  bad = describe([*losses(60), float("nan"), 2.0])
  assert (bad["failed"], bad["failed_at"]) == ("not finite", 61)
  assert bad["train_loss"] is None and json.dumps(bad, allow_nan=False)


def row(variant, rate, seed, loss, failed=None, preset="study"):
  case = dict(variant=variant, rate=rate, seed=seed, preset=preset, steps=50)
  return dict(
    bench="stability",
    case=case,
    failed=failed,
    held_out_loss=loss,
    spikes=2,
    grad_norms=[1.0, 0.5],
  )


ROWS = [
  *(row("bf16", 1e-3, seed, 2.0 + seed / 10) for seed in range(3)),
  *(row("bf16", 1e-2, seed, 1.0 + seed / 10) for seed in range(3)),
  *(row("bf16", 1e-1, seed, 3.0, "diverged") for seed in range(3)),
  *(row("coat", 1e-3, seed, 2.0) for seed in range(3)),
  *(row("coat", 1e-2, seed, 1.2 + seed / 10) for seed in range(3)),
  row("coat", 1e-1, 0, None, "not finite"),
  row("coat", 1e-1, 1, 0.5),
  row("coat", 1, 0, 0.4),
]


def test_every_seed_must_train_at_the_largest_and_best_rates():
  rows = [row for row in ROWS if row["case"]["variant"] == "coat"]
  found = stability_figure.summarize(rows)
  # Rate 1 does not count, because one seed failed at 0.1, a lower rate.
  assert (found.largest, found.best) == (1e-2, 1e-2)
  assert found.failed == {1e-3: 0, 1e-2: 0, 1e-1: 1, 1: 0}
  assert found.losses[1e-1] == {1: 0.5}
  assert stability_figure.best_rates(ROWS, "bf16", 2) == [1e-3, 1e-2]
  with pytest.raises(ValueError, match="needs 3 rates .* got 2"):
    stability_figure.best_rates(ROWS, "bf16", 3)
  mean, half = stability_figure.interval([0.1, 0.2, 0.3])
  assert mean == pytest.approx(0.2)
  assert half == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_high_losses_do_not_stretch_the_axis():
  rows = [
    *ROWS,
    row("int8", 1e-3, 0, 21.0, "diverged"),
    row("int8", 1e-3, 1, 18.0),
    row("int8", 1e-2, 0, None, "not finite"),
  ]
  found = {
    name: stability_figure.summarize(
      row for row in rows if row["case"]["variant"] == name
    )
    for name in ("bf16", "coat", "int8")
  }
  # The highest loss at a rate that trained is 2.2. The lowest loss is 0.4.
  ends = stability_figure.limits(found)
  assert ends == pytest.approx((0.4 - 0.08 * 1.8, 2.2 + 0.08 * 1.8))
  assert stability_figure.limits({"int8": found["int8"]}) is None
  drawn = {}
  for name, summary in found.items():
    axes = Figure().subplots()
    stability_figure._draw_losses(axes, summary, ends[1], 1.0, color="C0")
    drawn[name] = {
      (line.get_marker(), *line.get_xdata())
      for line in axes.get_lines()
      if line.get_marker() in ("^", "x")
    }
  assert drawn["bf16"] == {("x", 1e-1)}
  assert drawn["coat"] == {("x", 1e-1)}
  assert drawn["int8"] == {("^", 1e-3), ("x", 1e-3), ("x", 1e-2)}


def test_progress_counts_only_planned_runs():
  case = dict(steps=1000, batch=16, seq=256)
  rows = [row("bf16", rate, 0, 2.0) for rate in (1e-3, 0.5)]
  rows += [row("bf16", 1e-3, 0, 2.0, preset="llama_60m")]
  for each in rows:
    each["case"] |= case
  said = stability.progress(rows)
  assert said.startswith("1 of 162 runs of the grid are complete. Besides")
  assert "grid, 1 runs" in said


@pytest.mark.slow
def test_table_pairs_losses_by_seed(tmp_path):
  table = stability_figure.draw(ROWS, "study", tmp_path / "figure.png")
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  bf16, coat = table.splitlines()[2:]
  assert bf16.split()[1:5] == ["3", "0.01", "0.01", "1.1000"]
  assert "+0.2000  ±0.0000" in coat
  with pytest.raises(ValueError, match="rows must include llama_60m, got none"):
    stability_figure.draw(ROWS, "llama_60m", tmp_path / "figure.png")


def test_only_missing_cases_are_run():
  case = dict(preset="study", steps=50)
  rates = dict(bf16=[1e-3, 0.5], coat=[1e-3])
  left = stability.cases(["bf16", "coat"], rates, [0, 7], ROWS, case)
  left = [(x["variant"], x["rate"], x["seed"]) for x in left]
  assert left == [
    ("bf16", 1e-3, 7),
    ("bf16", 0.5, 0),
    ("bf16", 0.5, 7),
    ("coat", 1e-3, 7),
  ]


def test_variants_match_their_names():
  base = stability.study()
  model = base.model
  layer = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
  values = model.num_layers * layer + 2 * model.vocab_size * model.d_model
  assert 14e6 < values < 15e6
  found = {name: stability.setup(base, name) for name in stability.VARIANTS}
  assert len(stability.VARIANTS) == 9
  assert len(set(map(repr, found.values()))) == len(found)
  assert found["coat, E4M3 gradients"].formats.gradients == E4M3
  assert found["bf16"].config.optim.codec == "float32"


def test_no_run_starts_that_would_end_too_late(tmp_path, monkeypatch, capsys):
  clock = iter(range(0, 10_000, 60))  # Each reading is a minute later.
  time = types.SimpleNamespace(monotonic=lambda: next(clock))
  monkeypatch.setattr(stability, "time", time)
  for name in ("Data", "Programs"):
    monkeypatch.setattr(stability, name, lambda *args: object())
  monkeypatch.setattr(stability, "train_one", lambda *args: dict(failed=None))
  todo = [dict(variant="coat", rate=1e-3, seed=seed) for seed in range(9)]
  rows = tmp_path / "rows.jsonl"
  # Runs of a minute start after 2 and 5 minutes; after 7 it is too late.
  base = stability.study()
  assert stability.run(base, todo, None, rows, minutes=6) == 2
  assert len(read_rows(rows, "stability")) == 2
  assert "run the command again to continue" in capsys.readouterr().err
  assert stability.run(base, todo, None, rows, minutes=1e9) == 9


def test_runs_that_compile_are_timed_separately(tmp_path, monkeypatch):
  now = [0]
  time = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(stability, "time", time)
  for name in ("Data", "Programs"):
    monkeypatch.setattr(stability, name, lambda *args: object())

  def train_one(programs, config, data, rate, seed):
    # A variant's first run takes five minutes, the others one.
    now[0] += 60 if seed else 300
    return dict(failed=None)

  monkeypatch.setattr(stability, "train_one", train_one)
  todo = [dict(variant="bf16", rate=1e-3, seed=seed) for seed in range(9)]
  todo += [dict(variant="coat", rate=1e-3, seed=0)]
  rows, base = tmp_path / "rows.jsonl", stability.study()
  # After the first run, the second is expected to take as long.
  for minutes, count in ((10, 1), (12, 7), (18, 9), (19, 10)):
    assert stability.run(base, todo, None, rows, minutes=minutes) == count


TOY = dataclasses.replace(
  stability.study(),
  model=dataclasses.replace(
    stability.study().model,
    num_layers=1,
    d_model=64,
    d_ff=128,
    num_heads=2,
    num_kv_heads=1,
  ),
  batch=2,
  seq=32,
  eval_batches=2,
)


@pytest.mark.slow
def test_data_can_be_token_files(tmp_path, monkeypatch):
  found = []
  monkeypatch.setattr(
    stability, "run", lambda base, todo, source, *_, **__: found.append(source)
  )
  tokens = np.arange(2000, dtype=np.uint16) % 256
  tokens.tofile(tmp_path / "tokens.bin")
  line = ["run", "--data", tmp_path / "tokens.bin", "--rows", tmp_path / "rows"]
  stability.main([*map(str, line), "--data-dtype", "uint16"])
  np.testing.assert_array_equal(found[0].read(0, 2000), tokens)


@pytest.mark.slow
def test_runs_share_a_program_and_match_training(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(stability, "study", lambda: TOY)
  monkeypatch.setattr(stability_run, "CHUNK", 5)
  made = []

  class Programs(stability_run.Programs):
    def __init__(self, *args):
      super().__init__(*args)
      made.append(self)

  monkeypatch.setattr(stability, "Programs", Programs)
  path = tmp_path / "rows.jsonl"
  line = ["run", "--rows", path, "--variants", "coat", "--steps", "10"]
  line += ["--rates", "1e-3", "1e30", "--seeds", "3", "4"]
  line = [str(x) for x in line]
  assert stability.main(line) == 0
  rows = read_rows(path, "stability")
  assert [row["case"]["seed"] for row in rows] == [3, 4, 3, 4]
  # Failed runs have rows too.
  failed = {row["case"]["rate"] for row in rows if row["failed"]}
  assert failed == {1e30}
  assert made[-1].train._cache_size() == 1
  assert rows[0]["watch"]["activations_amax"] and rows[0]["watch"]["nu_power"]
  assert stability.main(line) == 0
  assert "0 runs" in capsys.readouterr().err
  assert read_rows(path, "stability") == rows

  # Train the same model with the step function of train.pretrain.
  optim = dataclasses.replace(TOY.optim, lr=1e-3)
  config = dataclasses.replace(TOY, optim=optim, seed=3, steps=10)
  optimizer, graph = step.build_optimizer(config), step.build_graph(config)
  train = jax.jit(step.train_step(config, graph, optimizer))
  state, found = step.initial_state(config, optimizer), []
  data = stability_run.Data(load_tokens(DataConfig(), 256), config)
  for tokens in data.train(3):
    state, metrics = train(state, tokens)
    found.append(float(metrics.loss))
  (row,) = [x for x in rows if x["case"]["seed"] == 3 and not x["failed"]]
  assert row["train_loss"] == pytest.approx(np.mean(found), rel=1e-4)
