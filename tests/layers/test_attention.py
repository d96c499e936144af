# SPDX-License-Identifier: Apache-2.0
"""Tests attention, its output projection, and the module `Attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import Attention, dot_product_attention, rope
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.layers.attention_output import attention_output
from tests.matrices import quick

RECIPES = {kept: recipes.coat(attention=kept) for kept in ("bf16", "fp8")}
HEADS, KV_HEADS, SIZE = 4, 2, 8


def case(heads=HEADS, kv_heads=KV_HEADS, seed=0):
  """Returns random x, q, k, v, w, bias and dy."""
  rng = np.random.default_rng(seed)
  shapes = [(2, 6, n, SIZE) for n in (heads, kv_heads, kv_heads)]
  shapes = [(2, 6, 24), *shapes, (heads * SIZE, 24), (24,), (2, 6, 24)]
  return [jnp.float32(rng.normal(size=s)) for s in shapes]


@functools.partial(jit, static_argnames="recipe")
def layer(args, dy, recipe):
  y, vjp = jax.vjp(lambda *a: attention_output(*a, recipe=recipe), *args)
  return y, vjp(dy)


@functools.partial(jit, static_argnames="kept")
def oracle(args, dy, kept):
  f = functools.partial(straight_through.attention_output, kept=kept)
  y, vjp = jax.vjp(f, *args)
  return y, vjp(dy)


@pytest.mark.parametrize(
  "kept, has_bias", quick(1, zip(RECIPES, (True, False), strict=True))
)
def test_output_block_matches_attention_then_linear(kept, has_bias):
  *args, dy = case()
  args[5] = args[5] if has_bias else None
  y, gradients = layer(args, dy, RECIPES[kept])
  want, want_gradients = oracle(args, dy, kept)
  # Layer and oracle compute softmax by different formulas, so they may round a
  # code of the output differently.
  assert_close(y, want)
  assert_close(gradients, want_gradients)


def test_output_block_in_bfloat16_is_close_to_f32():
  *args, w, bias, dy = case()
  *args, dy = (x.astype(jnp.bfloat16) for x in (*args, dy))
  exact = [x.astype(jnp.float32) for x in (*args, w, bias, dy)]
  # The layer rounds p, ds, out and dout to BF16. With FP8 attention, it also
  # rounds the dequantized q, k and v.
  for kept in RECIPES:
    y, gradients = layer((*args, w, bias), dy, RECIPES[kept])
    assert y.dtype == jnp.bfloat16
    assert [g.dtype for g in gradients[:4]] == [jnp.bfloat16] * 4
    assert [g.dtype for g in gradients[4:]] == [jnp.float32] * 2
    want, want_gradients = oracle(exact[:-1], exact[-1], kept)
    results = zip((y, *gradients), (want, *want_gradients), strict=True)
    for got, correct in results:
      error = jnp.linalg.norm(got.astype(jnp.float32) - correct)
      assert error < 0.01 * jnp.linalg.norm(correct)


def test_fp8_attention_matches_bf16_attention_at_the_saved_values():
  *args, dy = case()
  bf16, fp8 = (layer(args, dy, recipe) for recipe in RECIPES.values())
  assert jnp.max(jnp.abs(bf16[0] - fp8[0])) > 1e-3
  args[1:4] = map(straight_through.per_group, args[1:4])
  assert_close(fp8, layer(args, dy, RECIPES["bf16"]), 1e-6)


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_other_recipes_match_plain_layers(recipe):
  x, q, k, v, w, _, _ = case()
  got, _ = layer((x, q, k, v, w, None), x, recipe)

  @jit
  def by_hand(x, q, k, v, w):
    out = dot_product_attention(q, k, v).reshape(2, 6, -1)
    if recipe.linear == "fp8":
      return x + straight_through.linear(out, w)
    return x + out @ w

  assert_close(got, by_hand(x, q, k, v, w), 1e-6)


def module(recipe=None, **kwargs):
  kwargs = dict(num_kv_heads=KV_HEADS, head_dim=SIZE, recipe=recipe) | kwargs
  return Attention(24, HEADS, rngs=nnx.Rngs(0), **kwargs)


@jit
def run(m, x, positions=None):
  return m(x, positions)


@jit
def by_hand(m, x):
  """Computes the module's output from its parts, head by head."""
  b, t, _ = x.shape
  qkv = m.qkv(x).reshape(b, t, KV_HEADS, HEADS // KV_HEADS + 2, SIZE)
  if m.middle.clip is not None:
    qkv = jnp.clip(qkv, -m.middle.clip, m.middle.clip)
  heads = [qkv[:, :, i, j] for i in range(KV_HEADS) for j in range(2)]
  q = jnp.stack(heads, axis=2)
  k, v = qkv[:, :, :, 2], qkv[:, :, :, 3]
  if m.rope_theta is not None:
    positions = jnp.arange(t)
    q = rope(q, positions, theta=m.rope_theta)
    k = rope(k, positions, theta=m.rope_theta)
  bias = None if m.out.bias is None else m.out.bias[...]
  return attention_output(
    x, q, k, v, m.out.kernel[...], bias, causal=m.causal, recipe=m.recipe
  )


@pytest.mark.parametrize(
  "options, biases",
  [
    ({}, []),
    ({"rope_theta": None, "causal": False}, []),
    ({"clip_qkv": 0.5, "use_bias": True}, ["qkv", "out"]),
    ({"use_qkv_bias": True}, ["qkv"]),
    ({"use_bias": True, "use_qkv_bias": False}, ["out"]),
  ],
)
def test_attention_module_matches_its_parts(options, biases):
  m = module(recipes.coat(), **options)
  found = {"qkv": m.qkv.linear, "out": m.out}
  found = {name: p for name, p in found.items() if p.bias is not None}
  assert list(found) == biases
  for linear in found.values():
    linear.bias[...] = jnp.linspace(-1, 1, linear.bias.size)
  x = case()[0].astype(jnp.bfloat16)
  assert_same_bits(run(m, x), by_hand(m, x))


def test_gradients_through_clipping_match_autodiff():
  m = module(recipes.bf16(), clip_qkv=0.5, dtype=jnp.float32)
  graph, params = nnx.split(m)

  def gradient_of(f):
    def total(params, x):
      return jnp.sum(f(nnx.merge(graph, params), x) ** 2)

    return jit(jax.value_and_grad(total))(params, case()[0])

  # In `by_hand`, JAX differentiates `jnp.clip`.
  assert_close(gradient_of(lambda m, x: m(x)), gradient_of(by_hand.__wrapped__))


def test_module_accepts_any_leading_axes():
  m = module(dtype=jnp.float32)
  x = case()[0]
  # Per-tensor scales cover all rows, whatever the shape.
  assert_close(run(m, x[None])[0], run(m, x), 1e-6)
  assert jax.eval_shape(m, x[0]).shape == (6, 24)


def test_module_attends_only_to_the_past():
  m = module(dtype=jnp.float32)
  x = case()[0]
  later = x.at[:, 4:].multiply(-1)  # A change of sign changes no scale.
  y, y_later = run(m, x), run(m, later)
  assert_same_bits(y[:, :4], y_later[:, :4])
  assert jnp.any(y[:, 4:] != y_later[:, 4:])


def test_only_differences_of_positions_matter():
  m = module(dtype=jnp.float32)
  x = case()[0]
  positions = jnp.arange(6, dtype=jnp.int32)
  y = run(m, x, positions)
  assert_close(run(m, x), y, 1e-6)
  # A shift keeps all differences, but a few FP8 codes may change.
  shifted = run(m, x, positions + 100)
  assert jnp.linalg.norm(shifted - y) < 0.01 * jnp.linalg.norm(y - x)
  assert jnp.any(run(m, x, 2 * positions) != y)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (dict(num_kv_heads=3), "num_heads must be a multiple of num_kv_heads"),
    (
      dict(num_kv_heads=5, head_dim=None),
      "num_heads must be a multiple of num_kv_heads",
    ),
  ],
)
def test_inconsistent_numbers_of_heads_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    module(**arguments)
  with pytest.raises(ValueError, match="features must be a multiple of num_he"):
    Attention(25, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  "recipe", [*RECIPES.values(), recipes.bf16()], ids=["coat", "fp8", "bf16"]
)
def test_an_empty_batch_has_gradients_of_zero(recipe):
  attention = Attention(
    24, 4, num_kv_heads=2, use_bias=True, recipe=recipe, rngs=nnx.Rngs(0)
  )
  graph, params = nnx.split(attention)

  @jit
  def run(params, x):
    f = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    y, vjp = jax.vjp(f, params, x)
    return y, vjp(y)

  x = jnp.zeros((0, 6, 24), jnp.bfloat16)
  y, (dparams, dx) = run(params, x)
  assert y.shape == dx.shape == x.shape
  assert_same_bits(dparams, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize("sizes", [dict(num_heads=8), dict(head_dim=5)])
def test_heads_of_an_odd_size_are_refused(sizes):
  arguments = dict(num_heads=4, rope_theta=None) | sizes
  odd = sizes.get("head_dim", 3)
  message = f"the head size must be even.*got {odd}; pass an even head_dim"
  with pytest.raises(ValueError, match=message):
    Attention(24, **arguments, rngs=nnx.Rngs(0))
