# SPDX-License-Identifier: Apache-2.0
"""Configurations and presets: published numbers, and errors."""

import contextlib
import copy
import dataclasses
import math

import pytest

from coat_jax import codecs, recipes
from coat_jax.models.ranges import check_fields, range_of
from tests.train import own_codec
from train.config import ModelConfig, OptimConfig, resume_rule
from train.optimizers import learning_rate
from train.presets import PRESETS, demo, demo_moe

_GPT2 = PRESETS["gpt2"]().model

OWN = "tests.train.own_codec:scaled"

# Layers, d_model, d_ff, heads, KV heads, vocabulary, tied, sequence, theta and
# norm eps; then lr, schedule, last lr / peak lr, warmup steps and eps.
EXPECTED = {
  "gpt2": (
    "12 768 3072 12 12 50304 True 1024 1e4 1e-5",
    "6e-4 cosine .1 715 1e-8",
  ),
  "demo": (
    "4 128 352 4 2 256 False 256 1e4 1e-5",
    "1e-3 cosine 0 100 1e-8",
  ),
  "demo_gpu": (
    "8 2048 5504 16 16 256 False 2048 1e4 1e-5",
    "3e-4 cosine 0 150 1e-8",
  ),
  "demo_moe": (
    "4 128 192 4 2 256 False 256 1e4 1e-5",
    "1e-3 cosine 0 100 1e-8",
  ),
  "llama_60m": (
    "8 512 1376 8 8 32000 False 1024 1e4 1e-6",
    "1e-3 cosine 0 1000 1e-8",
  ),
  "llama_130m": (
    "12 768 2048 12 12 32000 False 1024 1e4 1e-6",
    "1e-3 cosine 0 2000 1e-8",
  ),
  "olmo_1b": (
    "16 2048 8192 16 16 50304 True 2048 1e4 1e-5",
    "4e-4 cosine .1 2000 1e-5",
  ),
  "olmo_7b": (
    "32 4096 11008 32 32 50304 False 2048 1e4 1e-5",
    "3e-4 linear .1 5000 1e-5",
  ),
  "llama2_7b": (
    "32 4096 11008 32 32 32000 False 4096 1e4 1e-5",
    "3e-4 cosine .1 2000 1e-8",
  ),
  "llama2_13b": (
    "40 5120 13824 40 40 32000 False 4096 1e4 1e-5",
    "3e-4 cosine .1 2000 1e-8",
  ),
  "llama_30b": (
    "60 6656 17920 52 52 32000 False 2048 1e4 1e-6",
    "1.5e-4 cosine .1 2000 1e-8",
  ),
  "llama3_8b": (
    "32 4096 14336 32 8 128256 False 8192 5e5 1e-5",
    "3e-4 cosine .1 2000 1e-8",
  ),
  "gemma2_2b": (
    "26 2304 9216 8 4 256000 True 8192 1e4 1e-6",
    "3e-4 cosine .1 2000 1e-8",
  ),
  "gemma2_9b": (
    "42 3584 14336 16 8 256000 True 8192 1e4 1e-6",
    "3e-4 cosine .1 2000 1e-8",
  ),
  "qwen3_30b_a3b": (
    "48 2048 768 32 4 151936 False 4096 1e6 1e-6",
    "3e-4 cosine .1 2000 1e-8",
  ),
}


def test_expected_numbers_cover_all_presets():
  # `finetune` takes the shape of its model from a checkpoint.
  assert PRESETS.keys() - {"finetune"} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_has_the_expected_numbers(name):
  expected = " ".join(EXPECTED[name]).split()
  config = PRESETS[name]()
  model, optim = config.model, config.optim
  got = [
    *(model.num_layers, model.d_model, model.d_ff, model.num_heads),
    *(model.num_kv_heads, model.vocab_size, model.tied_embeddings, config.seq),
    *(model.rope_theta, model.norm_eps, optim.lr, optim.schedule),
    *(optim.min_lr_ratio, optim.warmup_steps(config.steps), optim.eps),
  ]
  for value, text in zip(got, expected, strict=True):
    if isinstance(value, str | bool):
      assert str(value) == text
    else:
      assert value == float(text)
  assert (optim.b1, optim.b2, optim.weight_decay) == (0.9, 0.95, 0.1)
  assert optim.grad_clip == 1 and optim.codec == "coat"
  families = {"olmo": "olmo", "gemma2": "gemma2", "demo_moe": "qwen3_moe"}
  families["gpt2"] = "gpt2"
  families |= {"qwen3": "qwen3_moe"}
  named = families.get(name, families.get(name.split("_")[0], "llama"))
  assert model.family == named
  if name == "qwen3_30b_a3b":
    assert (model.num_experts, model.experts_per_token) == (128, 8)
    assert model.head_dim == 128 and model.normalize_experts
    assert model.auxiliary_loss == 0.001
  assert config.out == f"runs/{name}"


def replace(config, **values):
  """Replaces fields; `optim__lr` is the field lr of optim."""
  for name, value in values.items():
    part, _, field = name.rpartition("__")
    if part:
      value = dataclasses.replace(getattr(config, part), **{field: value})
    config = dataclasses.replace(config, **{part or name: value})
  return config


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(model__d_model=130), "got d_model 130 and num_heads 4"),
    (dict(model__num_kv_heads=3), "multiple of num_kv_heads, got 4 and 3"),
    (
      dict(model__d_ff=0),
      "d_ff must be a whole number from 1 to 1048576, got 0",
    ),
    (dict(model__clip_qkv=-1.0), "clip_qkv must be a number above 0"),
    (dict(optim__lr=0.0), "lr must be a number above 0"),
    (dict(optim__warmup=-1), "warmup must be a number at least 0"),
    (dict(optim__b2=1.0), "b2 must be a number from 0 to 0.9999999, got 1"),
    (dict(optim__b1=float("nan")), "b1 must be a number from 0 to .*, got nan"),
    (dict(optim__group_size=0), "group_size must be a whole number from 1"),
    (dict(steps=0), "steps must be a whole number at least 1"),
    (dict(steps="40"), "steps must be a whole number .*, got '40'"),
    (dict(keep=True), "keep must be a whole number .*, got True"),
    (dict(seed=-1), "seed must be a whole number at least 0"),
    (
      dict(model__vocab_size=10**20),
      "vocab_size must .* to 16777216, got 1000",
    ),
    (dict(model__rope_theta=math.inf), "rope_theta must be .*, got inf"),
    (dict(model__norm_eps=math.inf), "norm_eps must be a number .*, got inf"),
    (dict(optim__eps=math.inf), "eps must be a number from 1.2e-38 to 1, got"),
    (dict(optim__eps=1e-300), "eps must be a number from 1.2e-38 to 1, got"),
    (dict(optim__warmup=math.inf), "warmup must be a number .*, got inf"),
    (dict(optim__lr=10**400), "lr must be a number .*, got 10000000000000000"),
    (dict(profile="5:196"), "profile must fit into 200 steps, got 5:196"),
    (
      dict(model=dataclasses.replace(_GPT2, max_positions=100)),
      "TrainConfig: seq: gpt2 has .* for 100 tokens, got 256; pass .* --seq",
    ),
    (dict(profile="0"), "such as 5, or 5:100 for five .*, got '0'"),
    (dict(profile="5:"), "such as 5, or 5:100 for five .*, got '5:'"),
    (dict(optim__warmup=201), "warmup must fit into 200 steps, got 201"),
    (dict(resume=True, overwrite=True), "are mutually exclusive"),
    (dict(convert_state=True), "pass resume too, or leave convert_state out"),
    (dict(recipe="bf16", residuals="coat"), "residuals applies to recipe coat"),
    (dict(residuals="coat", recipe="fp8_linear"), "got recipe fp8_linear"),
    (
      dict(evaluation="bf16", recipe="bf16"),
      "recipe coat or fp8_block or fp8_linear or int8, got",
    ),
    (
      dict(recipe="fp8_block", mesh="fsdp=2,tensor=2"),
      "one device along the tensor axis, got 2; .* --recipe coat",
    ),
    (
      dict(remat="fp8", recipe="bf16"),
      "'fp8' needs .* such as coat, got recipe bf16",
    ),
    (dict(remat="fp8", recipe="fp8_linear"), "pass 'fp8_layer', .* or 'full'"),
    (dict(experts="fp8"), "experts fp8 needs a mixture .*; leave experts out"),
  ],
)
def test_config_rejects_values_out_of_range(values, words):
  with pytest.raises(ValueError, match=words):
    for name, value in values.items():
      # If there are two values, each of them may be valid alone.
      if len(values) == 1 or "__" in name:
        replace(demo(), **{name: value})
    dataclasses.replace(demo(), **values)


def test_fields_have_ranges_and_a_number_without_one_raises():
  found = {
    f"{type(part).__name__}.{field.name}"
    for part in (demo(), demo().model, demo().optim)
    for field in dataclasses.fields(part)
    if range_of(field.type)
  }
  assert found >= {"TrainConfig.keep", "ModelConfig.clip_qkv", "OptimConfig.lr"}
  with pytest.raises(TypeError, match="need a Range, as in Annotated"):
    range_of(float | None)


@pytest.mark.parametrize("name", ["TrainConfig", "OptimConfig", "ModelConfig"])
def test_ends_of_ranges_are_allowed_and_values_beyond_are_not(name):
  config = {type(x).__name__: x for x in (demo(), demo().optim, demo().model)}
  config = config[name]
  for field in dataclasses.fields(config):
    if not (found := range_of(field.type)):
      continue
    kind, allowed = found
    for value, is_allowed in (
      (kind(allowed.lowest), True),
      (kind(allowed.highest), True),
      (allowed.lowest - 1, False),
      (allowed.highest * 2, False),
      (math.nan, False),
    ):
      # Bypass __post_init__, which also checks whether fields fit together.
      changed = copy.copy(config)
      object.__setattr__(changed, field.name, value)
      with (
        contextlib.nullcontext()
        if is_allowed
        else pytest.raises(ValueError, match=f"{name}: {field.name} must be")
      ):
        check_fields(changed)


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(codec="float32", rounding="nearest"), "rounding applies to codec"),
    (dict(codec="log8", second="e5m2"), "second applies to codec coat, got"),
    (dict(codec="bfloat16", group_size=64), "group_size applies to codec"),
    (dict(codec="log8", rounding="nearest"), "freezes second moments"),
    (dict(codec="caot"), "got 'caot'; did you mean 'coat'"),
    (dict(codec="tests.train.own_codec:none"), "has no attribute 'none'"),
    (dict(codec="tests.train.own_codec:nothing"), "must return a MomentCodec"),
    (dict(codec="no.such_module:codec"), "No module named 'no'"),
    (dict(codec=OWN, rounding="nearest"), "rounding applies to codec coat or"),
  ],
)
def test_optim_config_rejects_codecs_and_options_it_cannot_use(values, words):
  with pytest.raises(ValueError, match=words):
    OptimConfig(lr=1e-3, **values)


@pytest.mark.parametrize("codec", codecs.names())
def test_codec_is_built_by_its_name(codec):
  assert OptimConfig(lr=1e-3, codec=codec).moment_codec().name == codec


def test_codec_of_a_module_is_built_with_the_options_it_takes():
  built = OptimConfig(lr=1e-3, codec=OWN, group_size=64).moment_codec()
  assert built == own_codec.scaled(64)


def test_recipe_gets_its_options():
  config = dataclasses.replace(
    demo_moe(),
    residuals="coat",
    attention="fp8",
    activation_group_size=32,
    experts="fp8",
    weight_cache="codes",
    evaluation="bf16",
  )
  assert config.coat_recipe() == recipes.coat(
    residuals="coat",
    attention="fp8",
    group_size=32,
    experts="fp8",
    weight_cache="codes",
    evaluation="bf16",
  )
  config = dataclasses.replace(demo(), recipe="fp8_linear", evaluation="bf16")
  assert config.coat_recipe() == recipes.fp8_linear(evaluation="bf16")
  for name in ("bf16", "fp8_linear", "coat", "fp8_block", "int8"):
    preset = getattr(recipes, name)
    config = dataclasses.replace(
      demo(), recipe=preset.__name__, implementation="xla"
    )
    assert config.coat_recipe() == preset(implementation="xla")


def test_twin_computes_in_bf16_whatever_the_options():
  config = dataclasses.replace(
    demo(),
    residuals="coat",
    compare="bf16",
    optim=OptimConfig(lr=2e-3, warmup=1, second="e5m2", group_size=64),
  )
  twin = config.bf16_twin(seed=7, out="twin")
  assert twin.coat_recipe() == recipes.bf16()
  assert twin.optim.moment_codec().name == "float32"
  assert (twin.seed, twin.out, twin.compare) == (7, "twin", None)
  assert (twin.model, twin.steps, twin.optim.lr) == (
    config.model,
    config.steps,
    2e-3,
  )


@pytest.mark.parametrize(
  "remat, of_twin",
  [("fp8", "full"), ("fp8_layer", "full"), ("full", "full"), ("dots", "dots")],
)
def test_twin_replaces_fp8_remat_with_full_remat(remat, of_twin):
  config = dataclasses.replace(demo(), remat=remat)
  assert config.bf16_twin(seed=0, out="twin").remat == of_twin
  assert config.with_f32_moments("fp8_linear").remat == of_twin


def test_comparison_of_a_run_with_itself_is_rejected():
  plain = demo().bf16_twin(seed=0, out="x")
  with pytest.raises(ValueError, match="would train the same run twice"):
    dataclasses.replace(plain, compare="bf16")
  # This run differs from its twin: it rounds its layers' inputs to FP8.
  dataclasses.replace(plain, compare="bf16", remat="fp8_layer")


@pytest.mark.parametrize(
  "schedule, middle", [("cosine", 0.55), ("linear", 0.55)]
)
def test_learning_rate_rises_and_falls(schedule, middle):
  config = dataclasses.replace(
    demo(),
    steps=110,
    optim=OptimConfig(lr=2.0, schedule=schedule, warmup=10, min_lr_ratio=0.1),
  )
  rate = learning_rate(config)
  assert [float(rate(i)) for i in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
  assert float(rate(10)) == pytest.approx(2.0)
  assert float(rate(60)) == pytest.approx(2.0 * middle)
  assert float(rate(110)) == pytest.approx(0.2)


def test_learning_rate_without_warmup_starts_at_its_peak():
  config = replace(demo(), optim__warmup=0)
  assert float(learning_rate(config)(0)) == pytest.approx(1e-3)


@pytest.mark.parametrize(
  "name, rule",
  [
    ("batch", "fixed"),
    ("model.d_ff", "fixed"),
    ("data.held_out", "fixed"),
    ("optim.codec", "converted"),
    ("data.path", "silent"),
    ("keep", "silent"),
    ("optim.lr", "reported"),
    ("steps", "reported"),
    ("an_option_of_long_ago", "reported"),
  ],
)
def test_field_or_its_part_determines_the_resume_rule(name, rule):
  assert resume_rule(name) == rule


def test_head_width_is_head_dim_or_follows_from_d_model():
  shape = vars(demo().model)
  assert ModelConfig(**shape).head_width == 32
  assert ModelConfig(**{**shape, "head_dim": 48}).head_width == 48
