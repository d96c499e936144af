# SPDX-License-Identifier: Apache-2.0
"""Plans with BF16 weights, updates in the backward pass and FP8 checkpoints.

As in test_terms, terms of plans equal sums of arrays, and plans are near the
peaks of steps compiled for H200s.
"""

import pytest

from tests.train.memory.runs import LLAMA2_7B, Case
from train.memory.step import fullest

COUNT, LAYER, HEAD = LLAMA2_7B.parameters, LLAMA2_7B.layer, LLAMA2_7B.head
IN_BACKWARD = dict(optimizer_in_backward=True)
EXPERTS = dict(family="qwen3_moe", num_experts=2, experts_per_token=2)


def case(batch, **model):
  return Case("llama2_7b", COUNT, batch, 2048, **model)


def planned(batch=4, *, value=2, gpus=1, model=None, **options):
  """Plans a step of 2048 tokens per sequence, on one of `gpus` GPUs."""
  params = {2: "bfloat16", 4: "float32"}[value]
  of_model = case(batch, **(model or {}))
  return of_model.plan("minimal", gpus, params=params, **options)


def sizes(batch):
  """Returns `u`, `a` and the bytes a layer saves, with sequences of 2048."""
  found = case(batch)
  return found.u, found.a, found.kept("minimal")


@pytest.mark.parametrize("value", [2, 4])
def test_gradients_have_the_dtype_of_their_weights(value):
  found = planned(value=value)
  assert found["embedding"].weights == value * COUNT
  assert found["embedding"].gradients == value * COUNT
  assert found["backward"].gradients == value * 32 * LAYER
  u, a, kept = sizes(4)
  # The peak is in SwiGLU, while the output weights' gradient is allocated.
  arrays = 7 * a + 1.5 * u + kept + value * HEAD
  assert abs(found["backward"].temporary - arrays) <= 1


def test_updates_in_backward_need_gradients_of_only_one_layer():
  found = planned(1, **IN_BACKWARD)
  u, a, _ = sizes(1)
  assert [x.gradients for x in found.values()] == [0, 0, 2 * HEAD]
  # One layer's four weights have BF16 gradients, and XLA allocates BF16 zeros
  # for the embedding's gradient.
  arrays = 2 * LAYER + 2 * a + 1.5 * u + 2 * HEAD
  assert abs(found["backward"].temporary - arrays) <= 1
  # With tied embeddings, the output's gradient stays allocated until the
  # gradient of the embedding's lookup is added.
  tied = planned(1, model=dict(tied_embeddings=True), **IN_BACKWARD)[
    "backward"
  ].temporary
  assert abs(tied - arrays - 2 * HEAD) <= 1


@pytest.mark.parametrize(
  "value, gpus, casts", [(4, 1, 1), (2, 1, 0), (2, 2, 1)]
)
def test_loss_casts_weights_unless_they_are_bf16_on_one_gpu(value, gpus, casts):
  found = planned(value=value, gpus=gpus)["loss"].temporary
  # The loss allocates logits and their gradient, the weights' f32 gradient,
  # hidden states and, if the weights are cast, their BF16 copy.
  logits = 4 * 512 * 32000
  u = sizes(4)[0]
  assert found == (4 + 2) * logits + (4 + 2 * casts) * HEAD + 3 * u


@pytest.mark.parametrize("sums, count", [("float32", 4), ("bfloat16", 2)])
def test_bf16_gradients_are_summed_in_the_requested_dtype(sums, count):
  assert planned()["loss"].gradients == 0
  found = planned(accumulate=2, grad_accumulate=sums)["loss"]
  assert found.gradients == count * COUNT
  # Gradients of f32 weights are summed in f32.
  assert planned(value=4, accumulate=2)["loss"].gradients == 4 * COUNT


def test_fp8_remat_saves_codes_and_recomputes_the_mlp():
  found = planned(remat="fp8", **IN_BACKWARD)["backward"]
  u, a, _ = sizes(4)
  # A layer saves codes and scales of both norms' inputs, and f32 statistics.
  kept = 2 * (u / 2 + u / 16 + 4 * 8192)
  assert found.activations == 32 * kept
  # Codes and scales of gate and up are recomputed.
  again = 2 * (a + a / 8)
  arrays = 7 * a + 1.5 * u + kept + again + 2 * HEAD
  assert abs(found.temporary - arrays) <= 1


@pytest.mark.parametrize("gpus", [1, 4])
def test_fp8_remat_recomputes_experts(gpus):
  found = planned(gpus=gpus, model=EXPERTS, remat="fp8", **IN_BACKWARD)
  u, a, _ = sizes(4)
  # Each token goes to two experts. For each of them, memory holds codes of gate
  # and up and, in BF16, the gradients of gate and up, SwiGLU's product and its
  # gradient, and the token and its gradient.
  copies = 2 * (2 * (a + a / 8) + 8 * a) + 2 * 2 * u
  # Other arrays are the layer's input, its gradient, the router's share of that
  # gradient, and codes of both blocks' inputs.
  arrays = copies + 3 * u + 2 * (u / 2 + u / 16)
  if gpus > 1:  # Codes of all gate and up weights, and of this GPU's part.
    arrays += (1 + 1 / gpus) * case(4, **EXPERTS).gate_up
  assert abs(found["backward"].temporary - arrays - 2 * HEAD) <= 1


@pytest.mark.parametrize("grad, size", [("float32", 4), ("bfloat16", 2)])
def test_gpus_sum_one_layers_gradients_at_a_time(grad, size):
  found = planned(1, gpus=4, grad_reduce=grad, **IN_BACKWARD)["backward"]
  u, a, _ = sizes(1)
  gate_up = LLAMA2_7B.gate_up
  # Gradients of gate, up, q, k and v are not summed over GPUs yet. Each GPU
  # also has its quarter of all gradients except those of gate and up.
  sums = size * (gate_up + LLAMA2_7B.qkv + (LAYER - gate_up) / 4)
  assert abs(found.temporary - sums - 2 * a - 1.5 * u - 2 * HEAD) <= 1


# Compiled peaks of llama2_7b's step (docs/rows/lean.jsonl).
@pytest.mark.parametrize(
  "compiled, batch, options",
  [
    (59_807_868_616, 4, dict()),
    (59_892_042_352, 4, dict(value=4, **IN_BACKWARD)),
    (46_296_690_296, 4, IN_BACKWARD),
    (32_618_958_417, 1, IN_BACKWARD),
    (31_037_065_840, 4, dict(remat="fp8", **IN_BACKWARD)),
    (28_839_628_369, 1, dict(remat="fp8", **IN_BACKWARD)),
    (32_676_235_892, 4, dict(gpus=2, **IN_BACKWARD)),
    (17_568_570_988, 4, dict(gpus=2, remat="fp8", **IN_BACKWARD)),
  ],
)
def test_plan_is_near_the_compiled_peak(compiled, batch, options):
  _, memory = fullest(planned(batch, **options))
  assert memory.total == pytest.approx(compiled, rel=0.02)
