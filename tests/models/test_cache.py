# SPDX-License-Identifier: Apache-2.0
"""Compares logits computed with a KV cache to those of whole sequences."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import Decoder, ModelConfig, param_shardings
from coat_jax.models.cache import (
  CHUNK,
  cached_forward,
  empty_cache,
  unstacked,
)
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.matrices import quick
from train.mesh import make_mesh, parse_mesh

V = 40
SMALL: dict[str, Any] = dict(
  num_layers=2,
  d_model=32,
  d_ff=48,
  num_heads=4,
  num_kv_heads=2,
  vocab_size=V,
  # These are far from all defaults, and large enough to affect results.
  rope_theta=50.0,
  norm_eps=0.1,
)
SCALING = "yarn,factor=4,original_max_position_embeddings=16"
# Gemma 2 has windows in some layers, soft caps on scores and on logits, and
# post norms. Qwen 3 has norms of q and k, and here a window in all layers.
CONFIGS = {
  "gemma2": ModelConfig(
    family="gemma2",
    **SMALL,
    tied_embeddings=True,
    window=5,
    full_every=2,
    query_scalar=7,
    attention_soft_cap=0.7,
    logits_soft_cap=2.0,
  ),
  "qwen3": ModelConfig(
    family="qwen3",
    **SMALL,
    head_dim=6,
    rotary_dim=4,
    window=5,
    rope_scaling=SCALING,
  ),
  "olmo": ModelConfig(family="olmo", **SMALL, clip_qkv=0.5),
  "gpt2": ModelConfig(
    family="gpt2",
    **SMALL | dict(rope_theta=1e4),
    tied_embeddings=True,
    max_positions=13,
    gelu="erf",
  ),
  "qwen2, tied": ModelConfig(family="qwen2", **SMALL, tied_embeddings=True),
  "qwen2": ModelConfig(family="qwen2", **SMALL),
  "llama": ModelConfig(family="llama", **SMALL),
  "olmo2": ModelConfig(family="olmo2", **SMALL),
  "mistral": ModelConfig(family="mistral", **SMALL, window=5),
  "gemma3": ModelConfig(
    family="gemma3_text",
    **SMALL,
    tied_embeddings=True,
    window=5,
    full_every=2,
    window_rope_theta=20.0,
    rope_scaling=SCALING,
  ),
  "qwen3_moe": ModelConfig(
    family="qwen3_moe", **SMALL, num_experts=5, experts_per_token=2
  ),
}


def build(config, recipe, *, dtype="float32", mesh=None):
  """Builds a decoder with the same random weights for every recipe."""
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipe, dtype=dtype, rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda w: jnp.asarray(rng.normal(0, 0.25, w.shape), w.dtype), params
  )
  if mesh is not None:
    pure = nnx.to_pure_dict(params)
    pure = jax.device_put(pure, param_shardings(mesh, pure))
    nnx.replace_by_pure_dict(params, pure)
  return nnx.merge(graph, params)


def without_cache(model):
  """Returns a function that computes logits of one unpadded sequence."""
  graph, params = nnx.split(model)

  @jit
  def run(params, tokens):
    model = nnx.merge(graph, params)
    return model.logits(tokens)[0]

  return lambda row: run(params, jnp.asarray(row[None]))


def cached_logits(model, rows, first, size):
  """Returns the logits of sequences, and the number of pads before each.

  Computes the first slots at once, and the others one by one. For the last
  three slots, the stack of layers is split beforehand, as in `generate`.

  Args:
    model: a Decoder.
    rows: sequences, which are padded on the left to the same length.
    first: number of slots that are computed at once.
    size: number of slots of the cache.
  """
  graph, params = nnx.split(model)

  @functools.partial(jit, static_argnames="is_cut")
  def run(params, tokens, cache, is_cut=False):
    model, layers = nnx.merge(graph, params), None
    if is_cut:
      layers = unstacked(model)
    hidden, cache = cached_forward(model, tokens, cache, layers)
    return model.logits_of_hidden(hidden), cache

  length = max(map(len, rows))
  padding = np.array([length - len(row) for row in rows], np.int32)
  tokens = np.stack([np.pad(row, (length - len(row), 0)) for row in rows])
  cache = jit(lambda padding: empty_cache(model, padding, size=size))(padding)
  out, cache = run(params, tokens[:, :first], cache)
  out = [out]
  for i in range(first, length):
    each, cache = run(params, tokens[:, i : i + 1], cache, i >= length - 3)
    out.append(each)
  assert int(cache.filled) == length
  return np.concatenate(out, axis=1), padding


def sequences(*lengths):
  rng = np.random.default_rng(2)
  return [rng.integers(0, V, length, np.int32) for length in lengths]


def check(model, plain, rows, first, size):
  run = without_cache(plain)
  out, padding = cached_logits(model, rows, first, size)
  for got, skip, row in zip(out, padding, rows, strict=True):
    assert_close(got[skip:], run(row))


@pytest.mark.parametrize("name", quick(2, CONFIGS))
def test_cached_logits_match_the_decoder(name):
  # Generation uses no FP8, whatever the model's recipe.
  model = build(CONFIGS[name], recipes.coat())
  plain = build(CONFIGS[name], recipes.bf16())
  check(model, plain, sequences(12, 9), first=6, size=16)


def test_cached_logits_of_a_long_prompt_match_the_decoder():
  model = build(CONFIGS["llama"], recipes.bf16())
  rows = sequences(2 * CHUNK, CHUNK + 30)
  check(model, model, rows, first=2 * CHUNK, size=2 * CHUNK + 4)


def test_cache_and_hidden_states_have_the_models_dtype():
  model = build(CONFIGS["llama"], recipes.coat(), dtype=jnp.bfloat16)
  cache = empty_cache(model, jnp.zeros(2, jnp.int32), size=8)
  tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
  hidden, cache = jax.eval_shape(
    functools.partial(cached_forward, model), tokens, cache
  )
  assert len(cache.k) == len(cache.v) == 2
  for x in (*cache.k, *cache.v):
    assert (x.shape, x.dtype) == ((2, 8, 2, 8), jnp.bfloat16)
  assert hidden.dtype == jnp.bfloat16
  logits = jax.eval_shape(model.logits_of_hidden, hidden)
  assert (logits.shape, logits.dtype) == ((2, 3, V), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes, name",
  quick(
    0,
    [
      ("data=2,fsdp=2,tensor=2", "llama"),
      ("data=2,fsdp=2,tensor=2", "qwen2, tied"),
      ("fsdp=8", "olmo"),
      ("data=2,fsdp=2,tensor=2", "gemma3"),
    ],
  ),
)
def test_cached_logits_on_a_mesh_match_one_device(sizes, name):
  mesh = make_mesh(parse_mesh(sizes))
  axes = MeshAxes(tensor="tensor" if "tensor" in sizes else None)
  recipe = dataclasses.replace(recipes.coat(), axes=axes)
  plain = build(CONFIGS[name], recipes.bf16())
  model = build(CONFIGS[name], recipe, mesh=mesh)
  rows = sequences(12, 9, 4, 12, 11, 7, 8, 5)
  with jax.set_mesh(mesh):
    check(model, plain, rows, first=6, size=16)
