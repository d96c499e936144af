# SPDX-License-Identifier: Apache-2.0
"""Model families: rows of a table."""

import jax
import pytest
from flax import nnx

from coat_jax import recipe as recipes
from coat_jax.models import config as configs
from coat_jax.models.config import Family, ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.specs import param_spec

SIZES = dict(num_layers=2, d_model=64, d_ff=160, num_heads=4, num_kv_heads=2)


def shapes(config):
  """Parameters by path."""
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
def test_family_chooses_the_parameters(family, more, less):
  config = ModelConfig(family=family, vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | more).items() if k not in less}
  assert shapes(config) == want
  tied = ModelConfig(
    family=family, vocab_size=384, tied_embeddings=True, **SIZES
  )
  want.pop("head")
  assert shapes(tied) == want


def test_family_is_a_row_of_a_table(monkeypatch):
  own = Family(norm="layer", norm_has_scale=False, qkv_bias=True)
  monkeypatch.setitem(configs.FAMILIES, "own", own)
  config = ModelConfig(family="own", vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | BIAS).items() if k not in SCALES}
  assert shapes(config) == want


def test_family_that_is_unknown_is_refused():
  with pytest.raises(ValueError, match="'lama'; did you mean 'llama'"):
    ModelConfig(family="lama", vocab_size=384, **SIZES)


def test_bias_of_qkv_is_split_with_its_columns():
  path = tuple(
    jax.tree_util.DictKey(key) for key in next(iter(BIAS)).split("/")
  )
  assert param_spec(path) == jax.P(None, "tensor")
