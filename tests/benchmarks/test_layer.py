# SPDX-License-Identifier: Apache-2.0
"""Tests the layer benchmark: its rows and its functions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import layer
from coat_jax import recipes
from coat_jax.models.layer import TransformerLayer
from tests import comparing
from train.presets import PRESETS

CONFIG = PRESETS["demo"]().model
SMALL = ["--preset=demo", "--batch=1", "--seq=32", "--repeats=2"]


def run(*arguments):
  return layer.main([*SMALL, *arguments])


@pytest.mark.slow
def test_timing_rows_report_speed_and_memory(capsys):
  rows = run("--variants", "minimal")
  printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert printed == rows
  assert [row["case"]["mode"] for row in rows] == ["forward", "full"]
  for row in rows:
    assert row["bench"] == "layer.time"
    assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    flops = layer.layer_flops(CONFIG, 1, 32)[row["case"]["mode"]]
    tflops = flops / row["median_ms"] * 1e-9
    assert row["tflops"] == pytest.approx(tflops, rel=1e-4)
    assert row["temporary_bytes"] > 0
  full = rows[1]
  assert 6 < full["remembered_units"] < 9
  assert full["case"]["weight_cache"] == "scale"


def test_scan_row_reports_memory_per_layer():
  (row,) = run("--scan-memory", "--variants=bf16_nothing", "--param-dtype=f32")
  assert row["bench"] == "layer.scan"
  assert row["case"]["param_dtype"] == "float32"
  # A recomputed layer saves only its input, 1 U.
  assert row["units_per_layer"] == pytest.approx(1, abs=0.1)


def test_layer_flops_counts_matmuls():
  config = PRESETS["llama2_7b"]().model
  found = layer.layer_flops(config, batch=4, seq=2048)
  weights = 4 * 4096**2 + 3 * 4096 * 11008
  # Attention has two matmuls; the causal mask halves their FLOPs.
  attention = 4 * 32 * 2048**2 * 128 * 2
  assert found["forward"] == 2 * 8192 * weights + attention
  assert found["full"] == 6 * 8192 * weights + 3.5 * attention


@pytest.mark.parametrize(
  "preset, products_in_mlp", [("gpt2", 2), ("qwen3_30b_a3b", 3 * 8)]
)
def test_layer_flops_counts_plain_mlps_and_experts(preset, products_in_mlp):
  config = PRESETS[preset]().model
  width, found = config.d_ff, layer.layer_flops(config, batch=1, seq=1024)
  wider = dataclasses.replace(config, d_ff=2 * width)
  more = layer.layer_flops(wider, batch=1, seq=1024)["forward"]
  of_mlp = 2 * 1024 * products_in_mlp * config.d_model * width
  assert more - found["forward"] == of_mlp


@pytest.mark.slow
def test_each_kind_of_alternating_layers_has_a_row():
  rows = layer.main(
    [
      *("--preset=gemma2_2b", "--batch=1", "--seq=64", "--scan-memory"),
      "--variants=bf16_nothing",
    ]
  )
  assert [row["case"]["kind"] for row in rows] == ["window", "full"]
  for row in rows:  # A recomputed layer saves only its input, 1 U.
    assert row["units_per_layer"] == pytest.approx(1, abs=0.1)


def test_kinds_of_separates_layers_with_and_without_a_window():
  config = PRESETS["gemma2_2b"]().model
  kinds = layer.kinds_of(config)
  keys = {"window": 4096 * 8192 - 4096**2 // 2, "full": 8192**2 // 2}
  found = {
    name: layer.layer_flops(kind, batch=1, seq=8192)["forward"]
    for name, kind in kinds.items()
  }
  assert {name: kind.window for name, kind in kinds.items()} == {
    "window": 4096,
    "full": None,
  }
  # The matmuls are q k^T and p v, for 8 heads of 256.
  more = 4 * 8 * 256 * (keys["full"] - keys["window"])
  assert found["full"] - found["window"] == more
  assert layer.kinds_of(CONFIG) == {None: CONFIG}


def test_layer_of_a_tower_sees_all_tokens_of_an_image():
  config = layer.TOWERS["siglip_so400m"]
  assert config.num_tokens == 27**2  # 384 pixels contain 27 whole patches.
  assert layer.TOWERS["clip_l"].num_tokens == 24**2 + 1
  found = layer.layer_flops(config, batch=2, seq=729)
  weights = 4 * 1152**2 + 2 * 1152 * 4304
  attention = 2 * 4 * 729**2 * 1152
  assert found["forward"] == 2 * 2 * 729 * weights + attention
  options = layer.parse(["--preset=clip_l", "--batch=16"])
  assert options.seq is None


@pytest.mark.slow
def test_variant_matches_the_layer_in_training():
  variant = layer.VARIANTS["minimal_codes"]
  shape = (1, 32, CONFIG.d_model)
  functions = layer.Layer(CONFIG, variant)
  params, x, dy = layer.make_arrays(functions, CONFIG, shape, jnp.float32)
  specs = layer.make_specs(functions, shape, jnp.float32)
  shapes = jax.tree.map(lambda a: (a.shape, a.dtype), (params, x, dy))
  assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), specs)
  expected = TransformerLayer(CONFIG, variant.recipe, rngs=layer.nnx.Rngs(0))
  y = comparing.jit(functions.forward)(params, x)
  comparing.assert_same_bits(y, comparing.jit(lambda x: expected(x))(x))
  stacked = jax.tree.map(lambda a: jnp.stack([a, a]), params)
  twice = comparing.jit(functions.scanned)(stacked, x)
  again = comparing.jit(functions.forward)(params, y)
  np.testing.assert_array_equal(
    *(a.astype(jnp.float32) for a in (twice, again))
  )


def test_variants_differ_and_include_bf16_with_each_checkpoint_policy():
  cases = [str(variant.case) for variant in layer.VARIANTS.values()]
  assert len(set(cases)) == len(cases)
  of_bf16 = {
    variant.checkpoint
    for variant in layer.VARIANTS.values()
    if variant.recipe == recipes.bf16()
  }
  assert {"none", "dots", "nothing"} <= of_bf16


@pytest.mark.parametrize(
  "wrong",
  [
    ["--seq", "0"],
    ["--preset", "llama9"],
    ["--variants", "fp7"],
    ["--preset", "clip_l", "--seq", "64"],
    ["--compile-only", "l9"],
  ],
)
def test_wrong_arguments_exit_with_2(wrong, capsys):
  with pytest.raises(SystemExit) as stopped:
    layer.main(wrong)
  assert stopped.value.code == 2
  assert "error:" in capsys.readouterr().err


@pytest.mark.tpu
def test_layer_can_be_compiled_for_a_tpu():
  sizes = ["--preset", "llama_60m", "--batch", "4", "--seq", "1024"]
  rows = layer.main([*sizes, "--compile-only", "v6e:2x2", "--variants", "bf16"])
  assert [row["case"]["compiled_for"] for row in rows] == ["TPU v6 lite"] * 2
  forward, full = (row["temporary_bytes"] for row in rows)
  # Arrays in fast memory are not counted.
  assert 0 < forward < full
