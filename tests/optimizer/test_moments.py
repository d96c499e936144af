# SPDX-License-Identifier: Apache-2.0
"""Which leaves are encoded, by which codec, and what is refused."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from coat_jax import codecs
from coat_jax.optax_coat import coat_adamw, scale_by_coat_adam
from coat_jax.optimizer import moments
from coat_jax.optimizer.moments import default_quantize_mask


def leaf(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
  "path",
  [
    "",
    "w",
    "layers/attn/qkv/kernel",
    "layers/mlp/norm_linear/weight",  # a matrix after a norm
    "upscale_proj/weight",
    "upscale",
    "normal/weight",
    "debiased/weight",
    "input_layernorm/kernel",  # no norm's parameter is called kernel
    "relative_attention_bias/embedding",
    "model.layers.0.self_attn.q_proj.weight",
    "alibi/weight",
    "lnet/weight",
    "layers/0/w1",
  ],
)
def test_default_quantize_mask_takes_matrices(path):
  assert default_quantize_mask(path, leaf(64, 64))


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
def test_default_quantize_mask_leaves_norms_and_biases(path):
  # Stacked over 32 layers, large enough to be encoded otherwise.
  assert not default_quantize_mask(path, leaf(32, 4096))


def test_default_quantize_mask_leaves_small_leaves_and_short_rows():
  assert default_quantize_mask("w", leaf(4096))
  assert not default_quantize_mask("w", leaf(4095))
  assert default_quantize_mask("w", leaf(512, 16))
  assert not default_quantize_mask("w", leaf(512, 15))
  assert not default_quantize_mask("w", leaf())


def test_mask_sees_the_same_path_with_and_without_variables():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  state = nnx.state({"layers": [model]}, nnx.Param)
  want = {"layers/0/kernel", "layers/0/bias"}
  assert {path for path, _ in moments.leaf_paths(state)} == want
  assert {path for path, _ in moments.leaf_paths(nnx.as_pure(state))} == want


def test_quantize_mask_overrides_and_is_asked_by_init_only():
  asked = []

  def mask(path, leaf):
    asked.append((path, leaf.shape))
    return path == "layer/bias"

  params = {"layer": {"bias": jnp.ones(20), "kernel": jnp.ones((64, 64))}}
  solver = scale_by_coat_adam(quantize_mask=mask)
  state = solver.init(params)
  assert state.mu_codes["layer"]["bias"].dtype == jnp.float8_e4m3fn
  assert state.mu_codes["layer"]["kernel"].dtype == jnp.float32
  assert asked == [("layer/bias", (20,)), ("layer/kernel", (64, 64))]
  _, state = solver.update(params, state)
  assert len(asked) == 2
  assert state.mu_codes["layer"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool_])
def test_leaves_that_are_not_real_floating_are_refused(dtype):
  params = {"ok": jnp.ones(3), "deep": [jnp.ones((64, 64), dtype)]}
  with pytest.raises(
    TypeError, match=f"{jnp.dtype(dtype)} at 'deep/0'.*masked"
  ):
    coat_adamw(1e-3).init(params)
  # The remedy works.
  mask = {"ok": True, "deep": [False]}
  optax.masked(coat_adamw(1e-3), mask).init(params)


def test_foreseeable_mistakes_are_named():
  params = {"w": jnp.ones((64, 128))}
  with pytest.raises(ValueError, match="codec=codecs.bfloat16"):
    coat_adamw(1e-3, mu_dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match="scalar at 'x'"):
    scale_by_coat_adam(quantize_mask=lambda *_: True).init({"x": jnp.ones(())})
  state = scale_by_coat_adam().init(params)
  for codec in (
    codecs.log8(),
    codecs.coat(64),
    codecs.fp8(),
    codecs.bfloat16(),
  ):
    with pytest.raises(ValueError, match=f"codec '{codec.name}' keeps"):
      scale_by_coat_adam(codec=codec).update(params, state)
  with pytest.raises(ValueError, match=r"\(64, 32\) for \(64, 128\) at 'w'"):
    scale_by_coat_adam().update({"w": jnp.ones((64, 32))}, state)
  with pytest.raises(ValueError, match="got 0 leaves for 1"):
    scale_by_coat_adam().update({"w": None}, state)
  # Another rounding reads the same state.
  nearest = scale_by_coat_adam(codec=codecs.coat(rounding="nearest"))
  nearest.update(params, state)
