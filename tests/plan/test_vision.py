# SPDX-License-Identifier: Apache-2.0
"""Steps of LLaVA 1.5 of 7B: sums of arrays, and the peaks that were compiled.

Rows are in docs/rows/vision_plan.jsonl, by `benchmarks.vision_memory`: 4
sequences of 2048 tokens with room for 2 images each.
"""

import json
from pathlib import Path

import jax
import pytest

from benchmarks import vision_memory
from coat_jax import plan, recipe
from coat_jax.plan import DecoderShape, Images, Load
from tests.plan.test_terms import LLAMA2_7B

ROWS = Path(__file__).parents[2] / "docs" / "rows" / "vision_plan.jsonl"
# Values of the weights, 64 words more than Llama 2 has.
WORDS = 64 * 4096
COUNTS = {
  "decoder": LLAMA2_7B.parameters + 2 * WORDS,
  "projector": 1024 * 4096 + 4096 * 4096 + 2 * 4096,
  "tower": 304_000_000,
}
TRAINED = {
  "projector": ["projector"],
  "decoder": ["projector", "decoder"],
  "all": list(COUNTS),
}
TOWER = DecoderShape(
  num_layers=23,
  d_model=1024,
  d_ff=4096,
  num_heads=16,
  num_kv_heads=16,
  vocab_size=0,
  is_layer_norm=True,
  is_gated=False,
)
DECODER = DecoderShape(
  num_layers=32,
  d_model=4096,
  d_ff=11008,
  num_heads=32,
  num_kv_heads=32,
  vocab_size=32064,
)
LOAD = Load(batch=4, seq=2048, loss_positions=512)


def planned(trained, load=LOAD, how=None):
  """Moments of a step with 8 images."""

  def tree(dtype, size=1.0):
    return {
      name: jax.ShapeDtypeStruct((int(size * count),), dtype)
      for name, count in COUNTS.items()
    }

  moments = tree("uint8", 2 + 10 / 128)
  return plan.plan_vision_step(
    DECODER,
    TOWER,
    how or recipe.coat(),
    load,
    Images(count=8, tower_tokens=577, tokens=576),
    trained=trained,
    params=tree("bfloat16"),
    optimizer_state={name: moments[name] for name in TRAINED[trained]},
  )


@pytest.mark.parametrize("trained", TRAINED)
def test_step_of_7b_is_its_arrays_and_what_was_compiled(trained):
  found = planned(trained)
  weights = 2 * sum(COUNTS.values())
  tokens, seen = 4 * 2048, 8 * 577
  saved = 32 * plan.kept_bytes(DECODER, recipe.coat()) * tokens
  # Of the projector: features, BF16 and f32 in front of GELU, BF16 behind it.
  images = 8 * 576 * (2 * 1024 + 8 * 4096)
  if trained == "all":
    # Codes of both norms' inputs with scales of 16, mean and root; GELU's
    # input; q, k, v, the output and log sums.
    layer = 2 * (1024 + 128 + 8) + 4096 + 512 + 2 * 4 * 1024 + 4 * 16
    images += 23 * layer * seen
  layers, head = 2 * 32 * (4 * 4096 + 3 * 11008) * 4096, 2 * 4096 * 32064
  backward = found["backward"]
  assert {memory.weights for memory in found.values()} == {weights}
  assert abs(backward.activations - saved - images) <= 2
  assert backward.gradients == (0 if trained == "projector" else layers)
  # Of one layer, and where they are trained of the output weights.
  alone = plan.plan_step(
    DECODER,
    recipe.coat(),
    LOAD,
    params=jax.ShapeDtypeStruct((COUNTS["decoder"],), "bfloat16"),
    optimizer_state=(),
  )["backward"]
  less = head if trained == "projector" else 0
  assert alone.temporary - backward.temporary == less
  assert ("tower" in found) is (trained == "all")
  if trained == "all":
    tower = found["tower"]
    assert tower.gradients == weights and abs(tower.activations - images) <= 1
  rows = map(json.loads, ROWS.read_text().splitlines())
  (row,) = (row for row in rows if row["case"]["trained"] == trained)
  peak, error = plan.fullest(found)[1].total, row["error"]
  assert abs(peak / row["peak_bytes"] - 1) <= 0.05 and abs(error) <= 0.05
  # Up to norms, biases and what pads groups of moments.
  assert abs(peak / row["planned_bytes"] - 1) <= 2e-3


@pytest.mark.slow
def test_rows_are_what_the_benchmark_plans():
  rows = [*map(json.loads, ROWS.read_text().splitlines())]
  assert {row["case"]["trained"] for row in rows} == set(TRAINED)
  for row in rows:
    stage, case = row["case"]["trained"], row["case"]
    _, *state, _ = vision_memory.abstract(stage)
    sizes = {name: case[name] for name in ("batch", "seq", "images")}
    found = vision_memory.plan(stage, *state, **sizes)
    moment, memory = plan.fullest(found)
    assert (moment, memory.total) == (row["moment"], row["planned_bytes"])


@pytest.mark.parametrize(
  "load, how, got",
  [
    (Load(batch=4, seq=2048, remat="full"), recipe.coat(), "remat='full'"),
    (Load(batch=4, seq=2048, fsdp=2), recipe.coat(), "fsdp=2"),
    (LOAD, recipe.bf16(), "recipe bf16"),
  ],
)
def test_what_is_not_planned_is_refused(load, how, got):
  with pytest.raises(NotImplementedError, match=f"got .*{got}.*; compile the"):
    planned("all", load, how)
