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


def row(candidate, seed, loss):
  case = COMMON | dict(candidate=candidate, seed=seed)
  values = dict(loss=loss, held_out_loss=loss and loss + 1, bytes_per_param=2.0)
  return dict(bench="codec_race.losses", case=case, **values)


@pytest.mark.slow
def test_errors_match_numpy():
  mu, nu = cases.moments((64, 128))
  trained = Trained({}, {"w": jnp.asarray(mu)}, {"w": jnp.asarray(nu)}, 0.0)
  exact = codec_race.errors_of(codec_race.CANDIDATES["float32"], trained)
  assert exact["m_error"] == exact["update_error"] == 0
  assert (exact["bytes_per_param"], exact["params"]) == (8, mu.size)
  found = codec_race.CANDIDATES["coat m, factored v"]
  values = codec_race.errors_of(found, trained)
  v = np.float64(nu)
  rank_one = v.mean(1, keepdims=True) * v.mean(0, keepdims=True) / v.mean()
  want = np.linalg.norm(np.sqrt(rank_one) - np.sqrt(v))
  want /= np.linalg.norm(np.sqrt(v))
  assert values["root_v_error"] == pytest.approx(want, rel=1e-4)
  # Bytes are those of E4M3 codes, 5 per group of 128, and two f32 vectors.
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
  lines = codec_race_table.table(rows, "demo").splitlines()
  (coat,) = (line for line in lines if line.startswith("| coat |"))
  # 12.71 is Student's t for two values, whose standard error is 0.125.
  assert f"+0.3750 ± {12.71 * 0.125:.4f}" in coat


def test_table_on_the_accuracy_page_equals_the_rows():
  rows = read_rows(DOCS / "rows" / "codec_race.jsonl", codec_race_table.BENCH)
  table = codec_race_table.table(rows, "demo")
  assert table in (DOCS / "accuracy.md").read_text()


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
