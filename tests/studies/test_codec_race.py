# SPDX-License-Identifier: Apache-2.0
"""Tests of `studies.codec_race`: errors, pairs, resuming, and a short run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from studies import codec_race, codec_race_table
from studies.rows import read_rows
from studies.trained_moments import Trained
from tests import cases
from tests.docs.pages import DOCS

COMMON = dict(preset="demo", steps=5, batch=1, seq=16)


def row(candidate, seed, loss, **rest):
  case = COMMON | dict(candidate=candidate, seed=seed) | rest
  values = dict(loss=loss, held_out_loss=loss and loss + 1, bytes_per_param=2.0)
  return dict(bench="codec_race.losses", case=case, **values)


@pytest.mark.slow
def test_errors_match_numpy():
  mu, nu = cases.moments((64, 128))
  trained = Trained({}, {"w": jnp.asarray(mu)}, {"w": jnp.asarray(nu)}, 0.0)
  exact = codec_race.errors_of(codec_race.CANDIDATES["float32"], trained)
  assert exact["m_error"] == exact["update_error"] == 0
  assert (exact["bytes_per_param"], exact["params"]) == (8, mu.size)
  found = codec_race.CANDIDATES["coat, factored"]
  values = codec_race.errors_of(found, trained)
  v = np.float64(nu)
  rank_one = v.mean(1, keepdims=True) * v.mean(0, keepdims=True) / v.mean()
  want = np.linalg.norm(np.sqrt(rank_one) - np.sqrt(v))
  want /= np.linalg.norm(np.sqrt(v))
  assert values["root_v_error"] == pytest.approx(want, rel=1e-4)
  # E4M3 codes, 5 bytes per group of 128 codes, and two f32 vectors for v.
  size = 1 + 5 / 128 + 4 * (64 + 128) / mu.size
  assert values["bytes_per_param"] == pytest.approx(size)
  assert 0.005 < values["m_error"] < 0.05


def test_differences_pair_seeds_and_leave_out_failures():
  rows = [row("float32", seed, 2.0 + seed) for seed in range(3)]
  rows += [row("coat", 0, 2.5), row("coat", 2, 4.25), row("coat", 7, 1.0)]
  rows += [row("int8", 1, None)]
  found = codec_race_table.differences(rows, "demo", "coat", "loss")
  assert found == [0.5, 0.25]
  assert codec_race_table.differences(rows, "demo", "int8", "loss") == []
  assert codec_race_table.differences(rows, "demo", "float32", "loss") == []
  assert codec_race_table.baseline("muon, int8") == "muon, float32"
  assert codec_race_table.baseline("coat, nearest") == "float32"


def test_repeated_runs_of_a_seed_are_averaged():
  rows = [row("float32", 0, 2.0), row("float32", 0, 2.5), row("coat", 0, 3.0)]
  found = codec_race_table.differences(rows, "demo", "coat", "loss")
  assert found == [0.75]
  rows += [row("coat", 0, None), row("coat", 1, 2.0)]
  assert codec_race_table.differences(rows, "demo", "coat", "loss") == []


def test_table_shows_an_interval_for_three_or_more_seeds():
  def line(name, rows):
    lines = codec_race_table.table(rows, "demo").splitlines()
    (found,) = (line for line in lines if line.startswith(f"| {name} |"))
    return found

  rows = [row("float32", seed, 2.0 + seed) for seed in range(3)]
  rows += [row("coat", 0, 2.5), row("coat", 2, 4.25), row("log8", 1, 3.125)]
  assert line("coat", rows) == "| coat | 2.00 |" + " +0.5000, +0.2500 |" * 2
  assert line("log8", rows) == "| log8 | 2.00 |" + " +0.1250 |" * 2
  losses = " 2.0000, 3.0000, 4.0000 | 3.0000, 4.0000, 5.0000 |"
  assert line("float32", rows) == "| float32 | 2.00 |" + losses
  # With three values, the 97.5 % quantile of Student's t is 4.303. The standard
  # deviation of these values is 0.125.
  shown = f" +0.3750 ± {4.303 * 0.125 / 3**0.5:.4f} |"
  assert shown * 2 in line("coat", [*rows, row("coat", 1, 3.375)])


def test_table_has_only_candidates_of_its_preset():
  rows = [row("float32", 0, 2.0), row("coat", 0, 2.5, preset="llama_60m")]
  assert "coat" not in codec_race_table.table(rows, "demo")
  assert "float32" not in codec_race_table.table(rows, "llama_60m")


@pytest.mark.parametrize("preset", ["demo", "llama_60m"])
def test_table_on_the_page_matches_the_rows(preset):
  rows = read_rows(DOCS / "rows" / "codec_race.jsonl", codec_race_table.BENCH)
  table = codec_race_table.table(rows, preset)
  assert table in (DOCS / "codec_race.md").read_text()


def test_runs_with_a_row_are_skipped():
  done = [row("coat", 0, 2.0)]
  todo = codec_race.cases(COMMON, ["float32", "coat"], (0, 1), done)
  got = [(case["candidate"], case["seed"]) for case in todo]
  assert got == [("float32", 0), ("float32", 1), ("coat", 1)]


@pytest.mark.slow
def test_short_race_appends_its_rows(tmp_path):
  path = tmp_path / "rows.jsonl"
  arguments = ["losses", "--steps", "25", "--batch", "1", "--seq", "16"]
  arguments += ["--rows", str(path), "--seeds", "0"]
  names = ["float32", "e2m1 m, factored v", "muon, int8"]
  assert codec_race.main([*arguments, "--candidates", names[0]]) == 0
  assert codec_race.main([*arguments, "--candidates", *names]) == 0
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [x["case"]["candidate"] for x in rows] == names
  sizes = [x["bytes_per_param"] for x in rows]
  assert sizes[0] == pytest.approx(8, abs=0.01) and sizes[1] < 0.7
  # All candidates start from the same weights and read the same batches.
  losses = [x["loss"] for x in rows[:2]]
  assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.1
