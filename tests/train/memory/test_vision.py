# SPDX-License-Identifier: Apache-2.0
"""Plans of LLaVA 1.5 7B equal sums of arrays, and are near compiled peaks.

`studies.vision_memory` made the rows in docs/rows/vision_plan.jsonl, for 4
sequences of 2048 tokens, each with room for 2 images.
"""

import json
from pathlib import Path

import jax
import pytest

from coat_jax import recipes
from studies import vision_memory
from tests.train.memory.runs import LLAMA2_7B, Case
from train.memory.count import saved_bytes
from train.memory.step import fullest

ROWS = Path(__file__).parents[3] / "docs" / "rows" / "vision_plan.jsonl"
# Weights of the 64 tokens that LLaVA adds to Llama 2's vocabulary, in one
# table. There are two tables.
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
DECODER = Case("llama2_7b", COUNTS["decoder"], 4, 2048, vocab_size=32064)


def planned(trained):
  """Plans a step with 8 images."""

  def tree(dtype, size=1.0):
    return {
      name: jax.ShapeDtypeStruct((int(size * count),), dtype)
      for name, count in COUNTS.items()
    }

  moments = tree("uint8", 2 + 10 / 128)
  optimizer = {name: moments[name] for name in TRAINED[trained]}
  sizes = dict(batch=4, seq=2048, images=2)
  return vision_memory.planned(trained, tree("bfloat16"), optimizer, **sizes)


@pytest.mark.parametrize("trained", TRAINED)
def test_plan_of_7b_equals_sum_of_arrays_and_is_near_the_compiled_peak(trained):
  found = planned(trained)
  weights = 2 * sum(COUNTS.values())
  tokens, seen = 4 * 2048, 8 * 577
  saved = 32 * saved_bytes(DECODER.model, recipes.coat()) * tokens
  # The projector saves features, GELU's input (BF16 and f32) and GELU's output.
  images = 8 * 576 * (2 * 1024 + 8 * 4096)
  if trained == "all":
    # A layer of the tower saves codes of the inputs of both norms and of GELU,
    # with a scale per 16 values; two f32 statistics of each norm; q, k, v and
    # attention's output; and the logarithms of softmax's sums.
    layer = 2 * (1024 + 128 + 8) + 4096 + 512 + 2 * 4 * 1024 + 4 * 16
    images += 23 * layer * seen
  layers, head = 2 * 32 * (4 * 4096 + 3 * 11008) * 4096, 2 * 4096 * 32064
  backward = found["backward"]
  assert {memory.weights for memory in found.values()} == {weights}
  assert abs(backward.activations - saved - images) <= 2
  assert backward.gradients == (0 if trained == "projector" else layers)
  # The output weights have a gradient only if the decoder is trained.
  alone = DECODER.plan("minimal", params="bfloat16")["backward"]
  less = head if trained == "projector" else 0
  assert alone.temporary - backward.temporary == less
  assert ("tower" in found) is (trained == "all")
  if trained == "all":
    tower = found["tower"]
    assert tower.gradients == weights and abs(tower.activations - images) <= 1
  rows = map(json.loads, ROWS.read_text().splitlines())
  (row,) = (row for row in rows if row["case"]["trained"] == trained)
  peak, error = fullest(found)[1].total, row["error"]
  assert abs(peak / row["peak_bytes"] - 1) <= 0.05 and abs(error) <= 0.05
  # The counts above leave out norms, biases, and padding in moments' groups.
  assert abs(peak / row["planned_bytes"] - 1) <= 2e-3


@pytest.mark.slow
def test_rows_equal_the_plans_of_the_study():
  rows = [*map(json.loads, ROWS.read_text().splitlines())]
  assert {row["case"]["trained"] for row in rows} == set(TRAINED)
  for row in rows:
    stage, case = row["case"]["trained"], row["case"]
    _, *state, _ = vision_memory.abstract(stage)
    sizes = {name: case[name] for name in ("batch", "seq", "images")}
    found = vision_memory.planned(stage, *state, **sizes)
    moment, memory = fullest(found)
    assert (moment, memory.total) == (row["moment"], row["planned_bytes"])
