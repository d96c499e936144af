# SPDX-License-Identifier: Apache-2.0
"""Tests model families, which are rows of a table."""

import jax
import pytest
from flax import nnx
from jax import P

from coat_jax import recipes
from coat_jax.models import config as configs
from coat_jax.models.config import Family, ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.params import param_spec
from train.step import decays

SIZES = dict(num_layers=2, d_model=64, d_ff=160, num_heads=4, num_kv_heads=2)


def shapes(config):
  """Returns the shapes of parameters by path."""
  model = nnx.eval_shape(
    lambda: Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
  )
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): p.shape
    for path, p in jax.tree_util.tree_leaves_with_path(params)
  }


LLAMA = {
  "embedding": (384, 64),
  "head": (64, 384),
  "layers/attention/out/kernel": (2, 64, 64),
  "layers/attention/qkv/linear/kernel": (2, 64, 128),
  "layers/attention/qkv/norm/scale": (2, 64),
  "layers/mlp/down/kernel": (2, 160, 64),
  "layers/mlp/gate_up/kernel": (2, 64, 2, 160),
  "layers/mlp/norm/scale": (2, 64),
  "norm/scale": (64,),
}
BIAS = {"layers/attention/qkv/linear/bias": (2, 128)}
SCALES = [name for name in LLAMA if name.endswith("scale")]


@pytest.mark.parametrize(
  "family, more, less",
  [
    ("llama", {}, []),
    ("olmo", {}, SCALES),
    ("qwen2", BIAS, []),
    ("mistral", {}, []),
  ],
)
def test_family_determines_the_parameters(family, more, less):
  config = ModelConfig(family=family, vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | more).items() if k not in less}
  assert shapes(config) == want
  tied = ModelConfig(
    family=family, vocab_size=384, tied_embeddings=True, **SIZES
  )
  want.pop("head")
  assert shapes(tied) == want


def test_family_with_experts_has_a_router_and_stacked_experts():
  sizes = SIZES | dict(vocab_size=384, num_experts=6, experts_per_token=2)
  found = shapes(ModelConfig(family="qwen3_moe", **sizes))
  mlp = {k: v for k, v in found.items() if k.startswith("layers/mlp/")}
  assert mlp == {
    "layers/mlp/down": (2, 6, 160, 64),
    "layers/mlp/gate_up": (2, 6, 64, 2, 160),
    "layers/mlp/norm/scale": (2, 64),
    "layers/mlp/router": (2, 64, 6),
  }
  with pytest.raises(ValueError, match="num_experts does not apply to family"):
    ModelConfig(family="llama", **sizes)
  for change in (dict(num_experts=None), dict(experts_per_token=7)):
    with pytest.raises(ValueError, match="qwen3_moe needs num_experts and"):
      ModelConfig(family="qwen3_moe", **(sizes | change))


def test_row_added_to_the_table_is_a_family(monkeypatch):
  own = Family(norm="layer", norm_has_scale=False, qkv_bias=True)
  monkeypatch.setitem(configs.FAMILIES, "own", own)
  config = ModelConfig(family="own", vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | BIAS).items() if k not in SCALES}
  assert shapes(config) == want


def test_gpt2_has_biases_and_learned_positions():
  config = ModelConfig(
    family="gpt2",
    vocab_size=384,
    tied_embeddings=True,
    max_positions=32,
    **SIZES,
  )
  found = shapes(config)
  assert found == {
    "embedding": (384, 64),
    "position_embedding": (32, 64),
    "layers/attention/out/bias": (2, 64),
    "layers/attention/out/kernel": (2, 64, 64),
    "layers/attention/qkv/linear/bias": (2, 128),
    "layers/attention/qkv/linear/kernel": (2, 64, 128),
    "layers/attention/qkv/norm/bias": (2, 64),
    "layers/attention/qkv/norm/scale": (2, 64),
    "layers/mlp/down/bias": (2, 64),
    "layers/mlp/down/kernel": (2, 160, 64),
    "layers/mlp/norm/bias": (2, 64),
    "layers/mlp/norm/scale": (2, 64),
    "layers/mlp/up/bias": (2, 160),
    "layers/mlp/up/kernel": (2, 64, 160),
    "norm/bias": (64,),
    "norm/scale": (64,),
  }
  # Weight decay applies only to weights of matmuls.
  decayed = decays({name: 0 for name in found})
  assert {name for name in found if decayed[name]} == {
    name for name in found if name.endswith("kernel")
  }
  spec = {name: param_spec(name) for name in found}
  assert spec["position_embedding"] == spec["embedding"]
  assert spec["layers/mlp/up/kernel"] == P(None, "fsdp", "tensor")
  assert spec["layers/mlp/up/bias"] == P(None, "tensor")
  assert (
    spec["layers/mlp/down/bias"] == spec["layers/attention/out/bias"] == P()
  )


@pytest.mark.parametrize(
  "family, fields, words",
  [
    ("gpt2", {}, "gpt2 has learned positions and needs max_positions"),
    (
      "gpt2",
      dict(max_positions=8, rope_theta=5e5),
      "rope_theta does not",
    ),
    ("llama", dict(max_positions=8), "max_positions does not apply to family"),
    (
      "llama",
      dict(gelu="erf"),
      "gelu does not apply to family llama, got erf",
    ),
  ],
)
def test_missing_and_inapplicable_fields_are_refused(family, fields, words):
  with pytest.raises(ValueError, match=words):
    ModelConfig(family=family, vocab_size=384, **SIZES, **fields)


def test_unknown_family_is_refused():
  with pytest.raises(ValueError, match="'lama'; did you mean 'llama'"):
    ModelConfig(family="lama", vocab_size=384, **SIZES)


@pytest.mark.parametrize(
  "field, value, words",
  [
    ("family", None, "family must be a string, got None"),
    ("rope_scaling", {"type": "yarn"}, "must be a string or None, got {'type'"),
    ("tied_embeddings", "no", "must be True or False, got 'no'"),
    ("normalize_experts", 1, "must be True or False, got 1"),
    ("gelu", ["erf"], "gelu must be one of tanh, erf, got ."),
  ],
)
def test_values_of_wrong_types_are_refused(field, value, words):
  config = ModelConfig(family="llama", vocab_size=384, **SIZES)
  object.__setattr__(config, field, value)  # Avoids the tests' type checks.
  with pytest.raises(ValueError, match=f"ModelConfig: .*{words}"):
    config.__post_init__()


def test_bias_of_qkv_is_sharded_like_its_columns():
  assert param_spec(next(iter(BIAS))) == P(None, "tensor")
