# SPDX-License-Identifier: Apache-2.0
"""Compares gradients of attention with those of f32 attention on saved values.

A softmax does not change if the same number is added to all scores of a row, so
the gradients of a row's scores sum to 0. Adding one vector to all keys adds the
same number to all scores of a row. Therefore the sum of dk over keys is 0, and
so is the gradient of a bias of k. Neither would be 0 if the backward pass used
a different attention output than the forward pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import Attention
from coat_jax.layers.dot_product_attention import AttentionInputs
from coat_jax.models.remat import checkpointed
from coat_jax.ops import AttentionKind
from tests.comparing import assert_close, jit
from tests.layers import straight_through
from tests.layers.attention_output import forward, heads_middle, split
from tests.matrices import quick

B, T, D, N, K, H = 2, 12, 24, 4, 2, 8
# The first row has two documents, the second has one document and padding.
SEGMENTS = np.int32([[0] * 5 + [1] * 7, [3] * 10 + [-1] * 2])
FP8 = {
  "coat": recipes.coat(attention="fp8"),
  "saved set": recipes.coat(residuals="coat", attention="fp8"),
  "groups of 32": recipes.coat(attention="fp8", group_size=32),
  "fp8_block": recipes.fp8_block(attention="fp8"),
  "int8": recipes.int8(attention="fp8"),
}
PLAIN = {
  "coat, BF16 attention": recipes.coat(),
  "fp8_block, BF16 attention": recipes.fp8_block(),
  "fp8_linear": recipes.fp8_linear(),
  "bf16": recipes.bf16(),
}
OPTIONS = [
  {},
  dict(window=3, segments=SEGMENTS),
  dict(causal=False, scale=0.7),
]


@functools.partial(jit, static_argnames=("recipe", "kind"))
def middle_gradients(q, k, v, segments, dout, recipe, kind):
  """Returns dq, dk and dv of attention, without the projections around it."""
  middle = heads_middle(N, K, kind)
  inputs = AttentionInputs(jnp.arange(T), segments)
  saved = forward(middle, (q, k, v), inputs, recipe).saved
  dout = dout.reshape(B, T, N * H)
  gradient = middle.backward(saved, dout, None, recipe, has_bias=False)
  return split(middle, gradient, recipe)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", quick(1, [*FP8, "coat, BF16 attention"]))
def test_gradients_match_f32_attention_at_the_saved_values(name, options):
  rng = np.random.default_rng(0)
  q, k, v, dout = (
    jnp.float32(rng.normal(size=(B, T, n, H))) for n in (N, K, K, N)
  )
  recipe, options = (FP8 | PLAIN)[name], dict(options)
  segments = options.pop("segments", None)
  kind = AttentionKind(**options)
  found = middle_gradients(q, k, v, segments, dout, recipe, kind)
  if name in FP8:
    saved = recipe.group_size, recipe.formats.values
    q, k, v = (straight_through.per_group(x, *saved) for x in (q, k, v))
  f = functools.partial(
    straight_through.attention, kind=kind, segments=segments
  )
  assert_close(found, jit(lambda *heads: jax.vjp(f, *heads)[1](dout))(q, k, v))
  dk = np.asarray(found[1], np.float64)
  assert np.max(np.abs(dk.sum(1))) < 1e-6 * np.max(np.abs(dk).sum(1))


CASES = [
  ("coat", "none", {}),
  ("fp8_block", "none", {}),
  ("coat", "fp8", {}),
  ("coat", "fp8_layer", {}),
  ("coat", "full", {}),
  ("coat", "none", dict(clip_qkv=100.0)),
  ("coat", "none", dict(window=3)),
  ("coat", "none", dict(num_kv_heads=4)),
  *((name, "none", {}) for name in (FP8 | PLAIN)),
  *((name, "full", {}) for name in PLAIN),
]


@pytest.mark.parametrize("name, remat, options", quick(2, CASES))
def test_bias_of_k_has_zero_gradient(name, remat, options):
  recipe = (FP8 | PLAIN)[name]
  options = dict(num_kv_heads=K) | options
  module = Attention(
    D,
    N,
    head_dim=H,
    rope_theta=None,
    use_qkv_bias=True,
    dtype=jnp.float32,
    recipe=recipe,
    rngs=nnx.Rngs(0),
    **options,
  )
  run = lambda x, module: module(x)  # noqa: E731
  run = checkpointed(run, remat, recipe, is_gathering=False)
  x, dy = jax.random.normal(jax.random.key(0), (2, B, T, D))

  @jit
  def gradient(module, x, dy):
    return nnx.grad(lambda module: jnp.sum(run(x, module) * dy))(module)

  found = gradient(module, x, dy).qkv.linear.bias[...]
  found = np.asarray(found).reshape(options["num_kv_heads"], -1, H)
  assert np.max(np.abs(found[:, -2])) < 1e-5 * np.max(np.abs(found))
