# SPDX-License-Identifier: Apache-2.0
"""Tests the accuracy study: its rows, bounds and measurements."""

import dataclasses
import json
import re

import jax.numpy as jnp
import pytest

from coat_jax import codecs
from studies import accuracy, trained_moments
from tests import cases

CODECS = {"float32", "bfloat16", "fp8", "coat", "coat_e8m0", "log8", "int8"}


@pytest.fixture(scope="module")
def moments():
  """Returns the moments of a small model after a few steps of training."""
  model = dataclasses.replace(
    trained_moments.MODEL, num_layers=1, d_model=128, d_ff=256
  )
  return trained_moments.train_moments(30, model=model, batch=4, seq=32)


@pytest.fixture(scope="module")
def one_step(moments):
  return {
    (case.codec.name, case.rounding, case.second or ""): accuracy.codec_row(
      case, *moments
    )
    for case in accuracy.cases()
  }


def test_model_has_a_million_parameters():
  model = trained_moments.MODEL
  layer = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
  assert model.num_kv_heads == model.num_heads
  assert model.num_layers * layer >= 1_000_000


def test_cases_cover_every_codec_and_rounding():
  found = {(case.codec.name, case.rounding) for case in accuracy.cases()}
  eight_bit = {
    (name, rounding)
    for name in CODECS - {"float32", "bfloat16"}
    for rounding in ("nearest", "stochastic")
  }
  assert found == eight_bit | {("float32", "none"), ("bfloat16", "nearest")}
  labels = [case.label for case in accuracy.cases()]
  assert len(set(labels)) == len(labels)


@pytest.mark.slow
def test_one_step_errors_are_within_their_bounds(one_step):
  coat = one_step["coat", "nearest", "e4m3"]["update_rms_error"]
  assert 0 < coat <= 0.02
  grid = one_step["log8", "nearest", ""]
  assert grid["update_rms_error"] <= 1.1 * coat
  assert "called directly" in grid["note"]
  assert one_step["float32", "none", ""]["update_rms_error"] == 0
  for key, row in one_step.items():
    if key[0] not in ("fp8", "int8"):
      assert row["zeroed_v"] == 0
      # Exact updates are at most
      # (1 - b1) / sqrt((1 - b2) * (1 - b1^2 / b2)) = 1.17.
      assert row["max_update"] < 1.3
  # Without expansion, some v become zero.
  fp8, int8 = (one_step[key, "nearest", ""] for key in ("fp8", "int8"))
  assert 0 < fp8["zeroed_v"] < int8["zeroed_v"]


@pytest.mark.slow
def test_bytes_count_codes_and_statistics(one_step):
  expected = {
    "float32": 8,
    "bfloat16": 4,
    "fp8": 2 + 8 / 128,
    "int8": 2 + 8 / 128,
    "coat": 2 + 10 / 128,
    "coat_e8m0": 2 + 4 / 128,
    "log8": 2 + 4 / 128,
  }
  for (name, _, _), row in one_step.items():
    assert row["bytes_per_param"] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.slow
def test_parts_contain_the_groups_of_their_leaves(moments, one_step):
  (mu, nu), parts = moments
  assert mu.shape == nu.shape and mu.shape[-1] == 128
  width, layer = 128, 4 * 128 * 128 + 3 * 128 * 256
  sizes = {"embedding": 256 * width, "head": 256 * width, "layers": layer}
  found = {part: mu[groups].size for part, groups in parts.items()}
  assert found == sizes and sum(sizes.values()) == mu.size
  row = one_step["coat", "nearest", "e4m3"]
  by_part = row["update_rms_error_by_part"]
  assert by_part.keys() == sizes.keys()
  assert min(by_part.values()) <= row["update_rms_error"]
  assert max(by_part.values()) >= row["update_rms_error"]


def test_zeroed_v_are_counted_and_have_the_largest_updates():
  # Set a quarter of v to zero; the other values are exact.
  mu, nu = map(jnp.asarray, cases.moments((8, 512)))
  exact = trained_moments.Moments(jnp.zeros_like(mu), nu)
  same = accuracy.update_errors(exact, exact)
  assert not same["error"].any() and int(same["zeroed"]) == 0
  stored = exact._replace(nu=jnp.where(jnp.arange(512) < 128, 0, nu))
  found = accuracy.update_errors(exact, stored)
  assert found["error"].shape == (8,)
  assert int(found["zeroed"]) == 8 * 128
  assert int(found["nonzero"]) == 8 * 512
  assert float(found["max_update"]) > float(same["max_update"])
  # If v = 0 and mu = 0, an update is (1 - b1) / sqrt(1 - b2) for any g.
  assert float(found["max_update"]) == pytest.approx(0.1 / 0.05**0.5, rel=1e-3)


@pytest.mark.slow
def test_stochastic_rounding_tracks_v_and_nearest_freezes_it():
  _, nu = cases.moments((32, 128))
  sizes = jnp.sqrt(jnp.asarray(nu))

  def median(codec):
    ratio, trace = accuracy.track(codec.nu, sizes, 0.99, steps=600, every=100)
    assert trace.shape == (6,)
    row = accuracy.tracking_row(ratio)
    assert float(trace[-1]) == pytest.approx(row["median_ratio"], rel=1e-5)
    assert row["p10"] <= row["median_ratio"] <= row["p90"]
    return row["median_ratio"]

  assert median(codecs.float32()) == pytest.approx(1, abs=1e-5)
  assert median(codecs.coat(rounding="nearest")) > 1.5
  # The mean of v is right. Its median is lower, because b2 = 0.99 averages over
  # few steps, and rounding to codes that are 6 to 13 % apart skews v.
  for codec in (codecs.coat(), codecs.coat_e8m0(), codecs.log8()):
    assert 0.85 <= median(codec) <= 1.1, codec.name


@pytest.mark.slow
def test_stochastic_rounding_tracks_v_at_the_default_b2():
  _, nu = cases.moments((32, 128))
  sizes = jnp.sqrt(jnp.asarray(nu))
  for codec in (codecs.coat(), codecs.coat_e8m0(), codecs.log8()):
    ratio, _ = accuracy.track(codec.nu, sizes, 0.999, steps=2000, every=500)
    row = accuracy.tracking_row(ratio)
    assert 0.9 <= row["median_ratio"] <= 1.1, codec.name
    assert 0.9 <= row["unchanged_median_ratio"] <= 1.1, codec.name


@pytest.mark.slow
def test_rows_are_json_with_all_keys(moments, capsys, tmp_path):
  chosen = accuracy.cases()[2:5]
  one_step, _, traces = accuracy.run_codecs(*moments, chosen, tracking_steps=20)
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  common = {"bench", "case", "date", "jax", "device"}
  count = len(chosen)
  assert len(rows) == count * (1 + len(accuracy.TRACKED_B2))
  for row in rows:
    assert common < row.keys()
    assert {"codec", "rounding"} <= row["case"].keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
  for row in rows[:count]:
    assert row["bench"] == "accuracy.codecs"
    assert {
      *("bytes_per_param", "update_rms_error", "max_update", "zeroed_v")
    } < row.keys()
  for row in rows[count:]:
    assert row["bench"] == "accuracy.tracking"
    assert row["case"]["b2"] in accuracy.TRACKED_B2
    assert {"median_ratio", "p10", "p90"} < row.keys()
  picture = tmp_path / "picture.png"
  accuracy.draw(one_step, traces, picture)
  assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "required: command"),
    (["codec"], "invalid choice"),
    (["codecs", "--steps", "0"], "from 1 to 1048576, got 0"),
    (["codecs", "--out", "."], "got the folder"),
    (["codecs", "--out", "x.y"], "got x.y"),
    (["codecs", "--codecs", "os:getcwd"], "MomentCodec"),
  ],
)
def test_wrong_arguments_are_refused_before_training(
  arguments, words, monkeypatch, tmp_path, capsys
):
  def train(*_, **__):
    raise AssertionError("trained before the arguments were checked")

  monkeypatch.setattr(accuracy, "train_moments", train)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as stopped:
    accuracy.main(arguments)
  assert stopped.value.code == 2
  errors = capsys.readouterr().err
  assert words in errors and "Traceback" not in errors
