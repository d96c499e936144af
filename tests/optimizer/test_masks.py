# SPDX-License-Identifier: Apache-2.0
"""Tests masks, which tell norms, biases and matrices apart by their paths."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from coat_jax import coat_adamw
from coat_jax.optimizer.masks import (
  default_quantize_mask,
  is_norm_or_bias,
  leaf_paths,
)


def leaf(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
  "path",
  [
    "",
    "w",
    "layers/attn/qkv/kernel",
    "layers/mlp/norm_linear/weight",  # This is a matrix after a norm.
    "upscale_proj/weight",
    "upscale",
    "normal/weight",
    "debiased/weight",
    "input_layernorm/kernel",  # No parameter of a norm is called kernel.
    "relative_attention_bias/embedding",
    "model.layers.0.self_attn.q_proj.weight",
    "alibi/weight",
    "lnet/weight",
    "layers/0/w1",
    "mamba/b_proj",
    "ssm/B",
    "attn/lora_b",
    "b",
  ],
)
def test_default_quantize_mask_chooses_matrices(path):
  assert default_quantize_mask(path, leaf(64, 64))
  assert not is_norm_or_bias(path)


@pytest.mark.parametrize(
  "path",
  [
    "bias",
    "layers/attn/qkv/bias",
    "layers/attn/qkv_bias",
    "lstm/bias_hh_l0",
    "layers/norm/scale",
    "layer_scale",
    "LayerNorm_0/scale",
    "LayerNorm_0/gamma",
    "model/layers/3/input_layernorm/weight",
    "model.layers.3.post_attention_layernorm.weight",
    "model/layers/q_norm/weight",
    "norms/0/weight",
    "norm1/weight",
    "norm_f/weight",
    "transformer/ln_f/weight",
    "h/0/ln_1/w",
    "ln_attn/w",
    "final_ln/w",
    "rmsnorm",
  ],
)
def test_default_quantize_mask_excludes_norms_and_biases(path):
  # Stacked over 32 layers, these leaves are large enough to be encoded.
  assert not default_quantize_mask(path, leaf(32, 4096))
  assert is_norm_or_bias(path)


def test_default_quantize_mask_excludes_small_leaves_and_short_rows():
  assert default_quantize_mask("w", leaf(64, 64))
  assert not default_quantize_mask("w", leaf(63, 65))
  assert default_quantize_mask("w", leaf(512, 16))
  assert not default_quantize_mask("w", leaf(512, 15))
  assert not default_quantize_mask("w", leaf())


@pytest.mark.parametrize("path", ["attn_q_b", "b_proj", "w", "kernel", "out_b"])
def test_short_vectors_are_norms_or_biases_whatever_their_names(path):
  assert is_norm_or_bias(path, leaf(8192))
  assert is_norm_or_bias(path, leaf())
  assert not default_quantize_mask(path, leaf(8192))


def test_long_vector_is_not_a_bias():
  params = {"w": jnp.ones((64, 64)), "bias": jnp.ones(3)}
  state = optax.flatten(coat_adamw(1e-3)).init(params)
  assert state[0].mu.codes.dtype == jnp.float8_e4m3fn
  assert not is_norm_or_bias("flat", leaf(1 << 20))


def test_default_quantize_mask_excludes_complex_leaves():
  assert not default_quantize_mask("kernel", leaf(64, 64, dtype=jnp.complex64))


def test_paths_are_the_same_with_and_without_nnx_variables():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  state = nnx.state({"layers": [model]}, nnx.Param)
  want = {"layers/0/kernel", "layers/0/bias"}
  assert {path for path, _ in leaf_paths(state)} == want
  assert {path for path, _ in leaf_paths(nnx.as_pure(state))} == want
