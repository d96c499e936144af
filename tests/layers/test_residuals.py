# SPDX-License-Identifier: Apache-2.0
"""Counts the arrays that layers save for the backward pass."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  LayerNorm,
  Linear,
  NormLinear,
  RMSNorm,
  activate,
)
from coat_jax.models.config import ModelConfig
from coat_jax.models.layer import TransformerLayer
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import num_groups
from tests.comparing import jit
from train.memory import count as memory_count
from train.memory.count import residual_arrays, residual_bytes

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FP8 = jnp.dtype(E4M3)
# No two axes have the same size, and no width is a multiple of 16.
T, D, F, N, K, G = 34, 72, 200, 6, 3, 16
H = D // N
CONFIG = ModelConfig(
  family="llama",
  num_layers=2,
  d_model=D,
  d_ff=F,
  num_heads=N,
  num_kv_heads=K,
  vocab_size=256,
)
COAT = [
  recipes.coat(residuals=kept, attention=attention)
  for kept in ("coat", "minimal")
  for attention in ("bf16", "fp8")
]


def held(f, *args):
  """Returns the arrays that f saves, without its arguments and scalars.

  Arrays with the same bytes count once, even if their shapes differ. f is
  jitted, because compiling it op by op would take half a minute.
  """
  leaves = jit(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args)
  known = {np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(args)}
  arrays = {np.asarray(leaf).tobytes(): leaf for leaf in leaves if leaf.ndim}
  return [leaf for content, leaf in arrays.items() if content not in known]


def kinds(arrays):
  """Counts the arrays of each dtype and shape."""
  return collections.Counter((a.dtype, a.shape) for a in arrays)


def groups(*shape, count=1):
  """Counts codes and scales of `count` arrays quantized in groups."""
  scales = (*shape[:-1], num_groups(shape[-1], G))
  return collections.Counter({(FP8, shape): count, (BF16, scales): count})


def split(module):
  graph, params = nnx.split(module)
  return (lambda params, x: nnx.merge(graph, params)(x)), params


def test_single_operations_save_their_inputs_in_fp8():
  x, y = jax.random.normal(jax.random.key(0), (2, 1, T, D), jnp.bfloat16)
  rngs = nnx.Rngs(0)
  rstd = collections.Counter({(F32, (1, T)): 1})
  # The operand of a matmul that sums over tokens is saved transposed.
  code = collections.Counter({(FP8, (D, T)): 1})
  expected = [
    (Linear(D, F, rngs=rngs), code),
    (RMSNorm(D, rngs=rngs), groups(1, T, D) + rstd),
    (LayerNorm(D, rngs=rngs), groups(1, T, D) + rstd + rstd),
    (NormLinear(D, F, rngs=rngs), groups(1, T, D) + rstd),
    (
      NormLinear(D, F, recipe=COAT[0], rngs=rngs),
      groups(1, T, D) + rstd + code,
    ),
  ]
  for module, want in expected:
    assert kinds(held(*split(module), x)) == want, type(module).__name__
  silu = functools.partial(activate, activation="silu")
  assert kinds(held(silu, x, y)) == groups(1, T, D, count=2)
  assert kinds(held(silu, x)) == groups(1, T, D)


def expected_layer(recipe):
  """Counts the arrays that a decoder layer should save."""
  want = groups(1, T, D, count=2) + groups(1, T, F, count=2)  # gate and up
  want[F32, (1, T)] += 2  # rstd
  want[F32, (1, T, N)] += 1  # log-sum-exp
  want[jnp.dtype(jnp.int32), (T,)] += 1  # positions
  if recipe.attention == "fp8":
    want += groups(1, T, N, H) + groups(1, T, K, H, count=2)
    want[BF16, (1, T, N, H)] += 1  # output
  else:
    want += {(BF16, (1, T, N, H)): 2, (BF16, (1, T, K, H)): 2}
  if recipe.residuals == "coat":
    want += groups(1, T, F)  # SiLU
    want += {(FP8, (D, T)): 2, (FP8, (1, T, F)): 1}  # operands
  return want


def run_layer(recipe):
  f, params = split(TransformerLayer(CONFIG, recipe, rngs=nnx.Rngs(0)))
  x = jax.random.normal(jax.random.key(1), (1, T, D), jnp.bfloat16)
  return held(f, params, x)


@pytest.mark.parametrize(
  "recipe", COAT, ids=lambda r: r.residuals + r.attention
)
def test_layer_saves_the_expected_arrays(recipe):
  want = collections.Counter(expected_layer(recipe))
  assert kinds(run_layer(recipe)) == want
  # `residual_arrays` counts the same arrays, and per-tensor scales.
  counted = residual_arrays(CONFIG, recipe, tokens=T)
  assert kinds(a for a, _ in counted if a.ndim) == want
  assert len([a for a, _ in counted if not a.ndim]) <= 9
  # The only large arrays wider than FP8 are the attention output and, with BF16
  # attention, q, k and v.
  wide = [
    a for a, kind in counted if a.dtype in (BF16, F32) and a.size >= T * D
  ]
  allowed = 4 if recipe.attention == "bf16" else 1
  assert len(wide) <= allowed


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_residual_arrays_match_the_saved_arrays_of_other_recipes(recipe):
  casts = {(D, (N + 2 * K) * H), (N * H, D), (D, 2, F), (F, D), (1, 1, D)}
  held = [a for a in run_layer(recipe) if a.shape not in casts]
  counted = residual_arrays(CONFIG, recipe, tokens=T)
  want = collections.Counter((a.dtype, a.size) for a in held)
  got = collections.Counter((a.dtype, a.size) for a, _ in counted if a.ndim)
  assert got == want


def test_clipping_stores_one_extra_bit_per_value():
  clipping = dataclasses.replace(CONFIG, clip_qkv=8.0)
  plain, clipped = (
    residual_bytes(config, recipes.coat(), tokens=T)
    for config in (CONFIG, clipping)
  )
  bits = (N + 2 * K) * H
  assert clipped["total"] - plain["total"] == pytest.approx(bits / 8)


def test_saved_bytes_of_each_kind_match_the_formulas():
  counted = residual_bytes(CONFIG, recipes.coat(residuals="coat"), tokens=T)
  scales = {n: 2 * num_groups(n, G) for n in (D, F)}
  assert counted["norm"] == pytest.approx(2 * (D + scales[D] + 4), abs=1)
  assert counted["activation"] == pytest.approx(3 * (F + scales[F]), abs=1)
  want = 2 * (2 * N + 2 * K) * H + 4 * N
  assert counted["attention"] == pytest.approx(want, abs=1)
  assert counted["linear"] == pytest.approx(2 * D + F, abs=1)
  assert counted["rope"] == 4
  assert counted["total"] == sum(counted.values()) - counted["total"]
  # Plain autodiff saves f32 inputs, xhat and rstd of two norms; gate, up, SiLU
  # and two arrays of the sigmoid; and the operands of qkv, gate_up and down.
  bf16 = residual_bytes(CONFIG, recipes.bf16(), tokens=T)
  assert bf16["norm"] == pytest.approx(2 * (2 * 4 * D + 8), abs=1)
  assert bf16["activation"] == 5 * 2 * F
  assert bf16["linear"] == 2 * (2 * D + F)
  assert bf16["attention"] == want


@pytest.mark.parametrize("norm", [None, "rms"])
def test_post_norm_saves_its_input_in_fp8(norm, monkeypatch):
  class Layer(nnx.Module):
    def __init__(self, config, recipe, rngs):
      options = dict(norm=norm, post_norm="rms", recipe=recipe, rngs=rngs)
      self.mlp = MLP(D, F, **options)

    def __call__(self, x):
      return self.mlp(x)

  recipe = recipes.coat()
  # Count the arrays of this class instead of those of a whole layer.
  monkeypatch.setattr(memory_count, "TransformerLayer", Layer)
  arrays = residual_arrays(CONFIG, recipe, tokens=T)
  want = groups(1, T, D) + groups(1, T, F, count=2)
  want[F32, (1, T)] += 1  # rstd
  in_front = collections.Counter({(FP8, (D, T)): 1})  # The matmul's operand.
  if norm is not None:
    in_front = groups(1, T, D) + collections.Counter({(F32, (1, T)): 1})
  assert kinds(a for a, _ in arrays if a.ndim) == want + in_front
  counted = residual_bytes(CONFIG, recipe, tokens=T)
  of_norm = D + 2 * num_groups(D, G) + 4
  assert counted["norm"] == of_norm * (1 if norm is None else 2)
  assert counted["linear"] == pytest.approx(D if norm is None else 0, abs=1)


def test_bytes_per_token_do_not_depend_on_the_number_of_tokens():
  few, many = (
    residual_bytes(CONFIG, recipes.coat(), tokens=tokens)
    for tokens in (256, 512)
  )
  for kind in few:  # All tokens share at most 9 scales.
    assert abs(few[kind] - many[kind]) < 4 * 9 / 256
