# SPDX-License-Identifier: Apache-2.0
"""Terms of plans equal sums of arrays, and plans are near XLA's peaks.

The tests write out the sums again, array by array. The peaks belong to steps
compiled for H200s. docs/rows/plan.jsonl has those without experts and without
recomputation; `make test-aot` compiles a few of the steps again.
"""

import dataclasses

import pytest

from benchmarks import training_step
from tests.train.memory.runs import DEMO, DEMO_MOE, LLAMA2_7B, Case
from train.memory.step import fullest, plan


def of_tokens(case, name):
  """Sums the arrays of the layer being differentiated, on one GPU."""
  a, u, kept = case.a, case.u, case.kept(name)
  return {
    # The peak is in attention. SwiGLU's product, gate and up are still
    # allocated, with q, k, v, the output and all their gradients.
    "bf16": 2 * 3 * a + 12 * u,
    # The peak is in SwiGLU: gradients of gate and up in BF16 (4 A) and in E5M2
    # as rows and as columns (4 A), and copies of what matmuls save.
    "fp8_linear": (4 + 4 + 1) * a + (1.5 + 3.5) * u,
    # Gradients of gate and up are in f32 (8 A) and twice in E5M2 (4 A). What
    # SwiGLU saved is already freed: gate, up, SiLU and product, each counted
    # with a BF16 scale per 16 values. (The product has no scales; counting
    # them changes the sum by at most 0.3 % of the peak.)
    "coat": (8 + 4) * a + 1.5 * u + kept - (4 + 4 * 2 / 16) * a,
    # The product's gradient is in BF16 (2 A), the gradients of gate and up are
    # twice in E5M2 (4 A), and the product is recomputed in E4M3 (A).
    "minimal": (2 + 4 + 1) * a + 1.5 * u + kept,
  }[name]


def of_weights(case, name):
  """Sums the layer's arrays at the moment with the most weight gradients."""
  a, u = case.a, case.u
  return {
    "bf16": 2 * (3 * a + case.gate_up) + 2 * u,
    "fp8_linear": 4 * case.gate_up + 4 * a + 2 * u,
    "coat": 4 * case.layer + 2 * a + 1.5 * u,
    "minimal": 4 * case.layer + 2 * a + 1.5 * u,
  }[name]


def on_four(case, name):
  """Sums the layer's arrays at the peak on one of four GPUs."""
  a, u = case.a, case.u
  # The four weights have f32 gradients. Gate and up weights have codes of all
  # rows, and further codes of this GPU's quarter.
  weights = 4 * case.layer + 1.25 * case.gate_up
  return {
    # The peak is in attention, with q, k and v weights gathered in BF16.
    "bf16": 2 * (3 * a + 1.25 * case.qkv) + (6 + 10) * u,
    "fp8_linear": (4 + 4) * a + 1.5 * u + weights,
    "coat": (8 + 4 + 2.25) * a + (1.5 + 0.5) * u + weights,
    "minimal": (2 + 4 + 1 + 2.25) * a + (1.5 + 0.5) * u + weights,
  }[name]


# `arrays` returns the largest sum; `compiled` is the peak that XLA reported.
@pytest.mark.parametrize(
  "case, gpus, name, arrays, compiled",
  [
    (DEMO, 1, "bf16", of_tokens, 613_475_752),
    (DEMO, 1, "fp8_linear", of_tokens, 555_836_976),
    (DEMO, 1, "coat", of_tokens, 294_050_212),
    (DEMO, 1, "minimal", of_tokens, 208_198_080),
    (LLAMA2_7B, 1, "bf16", of_tokens, 154_201_055_920),
    (LLAMA2_7B, 1, "fp8_linear", of_weights, 138_289_964_728),
    (LLAMA2_7B, 1, "coat", of_weights, 81_211_827_844),
    (LLAMA2_7B, 1, "minimal", of_weights, 77_109_814_920),
    (LLAMA2_7B, 4, "bf16", on_four, 61_483_393_968),
    (LLAMA2_7B, 4, "fp8_linear", on_four, 58_545_825_480),
    (LLAMA2_7B, 4, "coat", on_four, 31_289_673_364),
    (LLAMA2_7B, 4, "minimal", on_four, 27_025_901_208),
  ],
)
def test_backward_equals_its_arrays_and_is_near_the_compiled_peak(
  case, gpus, name, arrays, compiled
):
  moment, memory = fullest(case.plan(name, gpus))
  assert moment == "backward"
  # The rest is the gradient of the output weights, split by rows over GPUs.
  assert abs(memory.temporary - arrays(case, name) - 4 * case.head / gpus) <= 1
  assert memory.gradients == 4 * case.model.num_layers * case.layer // gpus
  assert memory.total == pytest.approx(compiled, rel=0.01)


def test_bf16_peak_with_few_tokens_is_in_the_mlp():
  case = Case("llama2_7b", LLAMA2_7B.parameters, batch=1, seq=256)
  head = 4 * case.head
  alone = case.plan("bf16")["backward"].temporary
  assert alone == of_weights(case, "bf16") + head
  gathered = 2 * (4 * case.a + 1.25 * case.gate_up) + 10 * case.u
  assert case.plan("bf16", 4)["backward"].temporary == gathered + head / 4


@pytest.mark.parametrize(
  "gpus, name, compiled",
  [
    (2, "bf16", 896_212_073),
    (8, "bf16", 875_349_769),
    (2, "fp8_linear", 880_648_277),
    (8, "fp8_linear", 860_774_485),
  ],
)
def test_plan_with_experts_is_near_the_compiled_peak(gpus, name, compiled):
  memory = fullest(DEMO_MOE.plan(name, gpus))[1]
  assert memory.total == pytest.approx(compiled, rel=0.04)


@pytest.mark.parametrize(
  "name, mesh, width, compiled",
  [
    ("bf16", "expert=4", 192, 667_990_597),
    ("bf16", "expert=4", 512, 1_189_587_573),
    ("bf16", "expert=2,fsdp=2", 192, 500_376_273),
    ("fp8_linear", "expert=4", 192, 628_539_069),
    ("fp8_linear", "expert=4", 512, 1_181_466_301),
  ],
)
def test_plan_with_distributed_experts_is_near_the_compiled_peak(
  name, mesh, width, compiled
):
  config = training_step.configure(
    "demo_moe", name, batch=64, seq=256, mesh=mesh
  )
  model = dataclasses.replace(config.model, d_ff=width)
  memory = fullest(plan(dataclasses.replace(config, model=model)))[1]
  assert memory.total == pytest.approx(compiled, rel=0.04)


@pytest.mark.parametrize("name", ["fp8_linear", "minimal"])
def test_gradients_summed_in_bf16_need_half_the_bytes(name):
  f32, bf16 = (
    LLAMA2_7B.plan(name, 4, grad_reduce=dtype)["backward"].temporary
    for dtype in ("float32", "bfloat16")
  )
  assert f32 - bf16 == 2 * LLAMA2_7B.layer


def test_second_forward_of_fp8_linears_adds_what_one_layer_saves():
  none, again = (
    LLAMA2_7B.plan("fp8_linear", remat=remat)["backward"].temporary
    for remat in ("none", "full")
  )
  assert abs(again - none - LLAMA2_7B.kept("fp8_linear")) <= 1


# Compiled with `benchmarks.training_step` for H200s.
LLAMA_130M = Case("llama_130m", 134_105_856, batch=16, seq=1024)
LLAMA3_70B = Case(
  "llama3_8b",
  70_553_706_496,
  batch=1,
  seq=8192,
  num_layers=80,
  d_model=8192,
  d_ff=28672,
  num_heads=64,
)


@pytest.mark.parametrize(
  "case, gpus, is_in_mlp, compiled",
  [
    (LLAMA2_7B, 1, True, 109_400_212_144),
    (LLAMA2_7B, 8, True, 15_787_033_264),
    (LLAMA3_70B, 64, True, 34_872_689_324),
    (LLAMA_130M, 4, False, 1_438_863_080),
  ],
)
def test_recomputed_bf16_layers_equal_their_arrays(
  case, gpus, is_in_mlp, compiled
):
  a, u = case.a, case.u
  model = case.model
  k = u * model.num_kv_heads / model.num_heads  # As many bytes as v.
  out = model.d_model**2
  if is_in_mlp:
    # gate and up (2 A), their gradients (2 A), the product's gradient (A); q,
    # the attention's output and four arrays of the residual stream; k and v;
    # and weights.
    arrays = 2 * (5 * a + case.gate_up) + (2 + 4) * u + 2 * k
  else:
    # gate and up, and their gradients; q, the output and their gradients; four
    # arrays of the residual stream; k, v and their gradients.
    arrays = 2 * 4 * a + (2 + 2 + 4) * u + (2 + 2) * k
  arrays += 2 * (case.qkv + out)
  # On a mesh, zeros for the embedding's gradient; the output weights' gradient.
  arrays += 2 * case.head * (gpus > 1) + 4 * case.head / gpus
  moment, memory = fullest(case.plan("bf16", gpus, remat="full"))
  assert moment == "backward"
  assert abs(memory.temporary - arrays) <= 1
  assert memory.total == pytest.approx(compiled, rel=0.005)


@pytest.mark.parametrize(
  "name, gpus, options, compiled",
  [
    ("minimal", 64, {}, 94_003_671_176),
    ("minimal", 64, dict(remat="fp8"), 27_718_955_152),
    ("minimal", 64, dict(remat="full"), 26_746_989_476),
    ("minimal", 64, dict(remat="fp8_layer"), 22_049_368_996),
    # XLA sums all gradients of a layer at once, because the sums are small.
    ("minimal", 256, dict(remat="fp8"), 21_284_722_068),
  ],
)
def test_plan_of_70b_on_many_gpus_is_near_the_compiled_peak(
  name, gpus, options, compiled
):
  memory = fullest(LLAMA3_70B.plan(name, gpus, **options))[1]
  assert memory.total == pytest.approx(compiled, rel=0.01)


def test_gradients_summed_at_once_are_alive_together():
  d, f, layers, vocabulary = 16384, 53248, 126, 128_512
  shape = dict(num_layers=layers, d_model=d, d_ff=f, num_heads=128)
  count = layers * (d * (d + 2048) + d**2 + 3 * d * f) + 2 * vocabulary * d
  case = Case("llama3_8b", count, 1, 8192, vocab_size=vocabulary, **shape)
  found = case.plan(
    "minimal",
    512,
    remat="fp8",
    params="bfloat16",
    optimizer_in_backward=True,
  )
  moment, memory = fullest(found)
  assert moment == "backward"
  assert memory.total == pytest.approx(59_624_399_448, rel=0.005)


def test_recomputed_fp8_linears_on_eight_gpus_are_near_the_compiled_peak():
  memory = fullest(LLAMA2_7B.plan("fp8_linear", 8, remat="full"))[1]
  assert memory.total == pytest.approx(16.2109e9, rel=0.005)


# LLAMA2_7B with twice the tokens.
LLAMA2_7B_4 = Case("llama2_7b", LLAMA2_7B.parameters, batch=4, seq=2048)


# The peak is in the MLP, as without a second forward, or at the layer's end,
# with the gradients of its weights.
@pytest.mark.parametrize(
  "case, remat, is_in_mlp, compiled",
  [
    (DEMO, "full", True, 114_849_500),
    (DEMO, "fp8_layer", True, 107_509_468),
    (DEMO, "fp8", True, 92_157_336),
    (LLAMA2_7B_4, "full", True, 70_974_145_712),
    (LLAMA2_7B_4, "fp8_layer", True, 70_034_621_616),
    (LLAMA2_7B_4, "fp8", False, 70_907_037_344),
  ],
)
def test_second_forward_equals_its_arrays_and_is_near_the_compiled_peak(
  case, remat, is_in_mlp, compiled
):
  a, u = case.a, case.u
  # The second forward allocates what a layer saves without remat, BF16 inputs
  # of attention and of the MLP, and an E4M3 operand. With remat="fp8", it
  # allocates codes of two norms' inputs, of gate and of up instead, each with a
  # BF16 scale per 16 values.
  norms = u * (1 + 2 / 16) + 2 * 4 * case.tokens
  kept = case.kept("minimal") + 2.5 * u
  kept = norms + 2 * (1 + 2 / 16) * a if remat == "fp8" else kept
  arrays = (2 + 4 + 1) * a + 1.5 * u + kept
  if not is_in_mlp:
    arrays = of_weights(case, "minimal")
  moment, memory = fullest(case.plan("minimal", remat=remat))
  assert moment == "backward"
  assert abs(memory.temporary - arrays - 4 * case.head) <= 1
  assert memory.total == pytest.approx(compiled, rel=0.025)


def test_second_forward_keeps_silu_and_operands_only_with_residuals_coat():
  minimal, coat = (
    DEMO.plan(name, remat="fp8")["backward"].temporary
    for name in ("minimal", "coat")
  )
  # `coat` needs 12 A instead of 7 A for gradients. It also allocates SiLU with
  # its scales, the product, and the operand of gate and up. What is already
  # freed is subtracted (see of_tokens).
  grown = (12 - 7) + (1 + 2 / 16) + 1 - 4.5
  assert abs(coat - minimal - grown * DEMO.a - 0.5 * DEMO.u) <= 1


def test_second_forward_on_four_gpus_is_near_the_compiled_peaks():
  none, fp8, layer, full = (
    LLAMA2_7B.plan("minimal", 4, remat=remat)["backward"]
    for remat in ("none", "fp8", "fp8_layer", "full")
  )
  # remat="fp8" recomputes gate and up, which XLA would otherwise copy.
  assert fp8.temporary == none.temporary
  assert fp8.total == pytest.approx(19_486_664_360, rel=0.01)
  attention = LLAMA2_7B.kept("minimal") - 2.25 * LLAMA2_7B.a
  assert abs(layer.temporary - none.temporary - attention) <= 1
  assert layer.total == pytest.approx(19_034_203_304, rel=0.01)
  assert full.temporary == layer.temporary
  assert full.total == pytest.approx(19_503_965_352, rel=0.01)


def test_tensor_axis_halves_temporary_arrays_except_in_the_loss():
  one, two = (LLAMA2_7B.plan("minimal", 4, tensor=n) for n in (1, 2))
  for moment in ("backward", "embedding"):
    assert two[moment].temporary == one[moment].temporary / 2
  # In the loss, only the head is halved. Each GPU has whole sequences but half
  # of the vocabulary, so a chunk has twice as many positions.
  logits, head = 2 * 1024 * 32000, LLAMA2_7B.head
  hidden = 3 * LLAMA2_7B.u
  assert one["loss"].temporary == (4 + 2) * (logits + head) + hidden
  assert two["loss"].temporary == (4 + 2) * (logits + head / 2) + hidden


@pytest.mark.parametrize("gpus, in_f32", [(1, 0), (4, 4)])
def test_embedding_gradient_is_summed_in_f32_on_a_mesh(gpus, in_f32):
  found = LLAMA2_7B.plan("minimal", gpus)["embedding"]
  # The gradient has all rows in BF16 and, on a mesh, also in f32 before GPUs
  # sum it. They still sum the gradient of the last layer's gate and up.
  last = 4 * LLAMA2_7B.gate_up if gpus > 1 else 0
  assert found.temporary == (2 + in_f32) * 32000 * 4096 + last
  assert found.gradients == 4 * LLAMA2_7B.parameters / gpus
  assert found.activations == 0


def test_tied_embedding_has_two_gradients_on_one_gpu():
  untied, tied = (
    Case("llama2_7b", 6_738_415_616, batch=2, seq=2048, tied_embeddings=each)
    for each in (False, True)
  )
  for name, count in (("minimal", 1), ("bf16", 2)):
    more, less = (
      each.plan(name)["embedding"].temporary for each in (tied, untied)
    )
    assert more - less == count * 4 * tied.head


def test_zeros_for_a_tied_embeddings_gradient_stay_allocated():
  # With BF16 layers on one GPU, XLA allocates them before the loss.
  shape = dict(vocab_size=131_072, tied_embeddings=True)
  case = Case("llama_60m", 92_414_464, batch=4, seq=1024, **shape)
  moment, memory = fullest(case.plan("bf16"))
  assert moment == "loss"
  assert memory.total == pytest.approx(3_293_016_693, rel=0.005)
