# SPDX-License-Identifier: Apache-2.0
"""Tests the norms of q and k in the attention block, and what they save."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  Attention,
  AttentionInputs,
  BlockWeights,
  Heads,
  LinearWeights,
  QKNorm,
  QKNormWeights,
  Rotary,
  SelfAttention,
  block,
)
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import num_groups
from coat_jax.ops import AttentionKind
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.matrices import quick

D, N, K, H, B, T, EPS = 24, 4, 2, 8, 2, 6, 1e-3
THETA, ROTARY_DIM, WINDOW, CAP, SCALE = 100.0, 4, 3, 2.0, 0.5
# The second row contains two documents.
POSITIONS = np.int32([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]])
SEGMENTS = np.int32([[0] * 6, [0, 0, 0, 0, 1, 1]])


def case(over, seed=0):
  """Returns random x, weights and dy."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.float32(rng.normal(size=shape))

  sizes = (H, H) if over == "head" else (N * H, K * H)
  width = (N + 2 * K) * H
  weights = BlockWeights(
    LinearWeights(normal(D, width) / 4, normal(width), normal(D)),
    LinearWeights(normal(N * H, D)),
    QKNormWeights(*map(normal, sizes)),
  )
  return normal(B, T, D), weights, normal(B, T, D)


@functools.partial(jit, static_argnames=("over", "recipe"))
def layer(x, weights, dy, over, recipe):
  f = functools.partial(
    block,
    inputs=AttentionInputs(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)),
    kind="rms",
    eps=EPS,
    middle=SelfAttention(
      Heads(N, K, Rotary(THETA, rotary_dim=ROTARY_DIM)),
      AttentionKind(window=WINDOW, soft_cap=CAP, scale=SCALE),
      qk_norm=QKNorm(over, EPS),
    ),
    recipe=recipe,
  )
  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


def turn(x):
  """Applies RoPE to the first channels, with complex numbers."""
  half = ROTARY_DIM // 2
  angle = POSITIONS[..., None] * THETA ** -(np.arange(half) / half)
  z = x[..., :half] + 1j * x[..., half:ROTARY_DIM]
  z = z * jnp.asarray(np.exp(1j * angle), jnp.complex64)[:, :, None]
  return jnp.concatenate([z.real, z.imag, x[..., ROTARY_DIM:]], axis=-1)


@functools.partial(jit, static_argnames=("over", "recipe"))
def oracle(x, weights, dy, over, recipe):
  f = functools.partial(
    straight_through.self_attention,
    kind=AttentionKind(window=WINDOW, soft_cap=CAP, scale=SCALE),
    segments=SEGMENTS,
    turn=turn,
    heads=(N, K),
    over=over,
    eps=EPS,
    recipe=recipe,
  )
  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@pytest.mark.parametrize(
  "over, recipe",
  quick(
    1,
    [
      ("head", recipes.coat()),
      ("all", recipes.coat(residuals="coat", attention="fp8")),
      ("all", recipes.coat()),
      ("head", recipes.coat(attention="fp8")),
      ("head", recipes.bf16()),
      ("all", recipes.bf16()),
      ("head", recipes.fp8_linear()),
      ("all", recipes.fp8_linear()),
    ],
  ),
)
def test_block_with_norms_of_q_and_k_matches_its_parts(over, recipe):
  arguments = case(over)
  y, gradients = layer(*arguments, over, recipe)
  want, want_gradients = oracle(*arguments, over, recipe)
  # Layer and oracle compute norms, RoPE and softmax by different formulas, so
  # they may round a code differently.
  assert_close(y, want)
  assert_close(gradients, want_gradients)


def module(over, recipe, head_dim=H, num_heads=N, **options):
  return Attention(
    D,
    num_heads,
    num_kv_heads=num_heads // 2,
    head_dim=head_dim,
    qk_norm=over,
    recipe=recipe,
    rngs=nnx.Rngs(0),
    **options,
  )


@pytest.mark.parametrize("over", quick(1, ["all", "head"]))
def test_module_passes_its_weights_to_the_block(over):
  recipe = recipes.coat(implementation="xla")
  m = module(over, recipe, dtype=jnp.float32, epsilon=EPS)
  sizes = {"head": (H, H), "all": (N * H, K * H)}[over]
  assert (m.q_norm.scale.shape, m.k_norm.scale.shape) == tuple(
    (size,) for size in sizes
  )
  x, weights, _ = case(over)
  weights = weights._replace(
    front=weights.front._replace(bias=None, w=m.qkv.linear.kernel[...])
  )
  m.qkv.norm.scale[...] = weights.front.gamma
  m.q_norm.scale[...] = weights.middle.q
  m.k_norm.scale[...] = weights.middle.k
  m.out.kernel[...] = weights.back.w

  @jit
  def both(m, x, weights):
    y = block(
      x,
      weights,
      AttentionInputs(jnp.arange(T, dtype=jnp.int32)),
      kind="rms",
      eps=EPS,
      middle=SelfAttention(Heads(N, K, 1e4), qk_norm=QKNorm(over, EPS)),
      recipe=recipe,
    )
    return m(x), y

  assert_same_bits(*both(m, x, weights))


# No two axes have the same size.
ROWS, HEADS, SIZE = 34, 6, 12


def saved_of_attention(over, recipe):
  """Counts the saved arrays of q, k, v and the output, by dtype and shape."""
  m = nnx.eval_shape(
    lambda: module(over, recipe, head_dim=SIZE, num_heads=HEADS)
  )
  graph, params = nnx.split(m, nnx.Param)
  x = jax.ShapeDtypeStruct((1, ROWS, D), jnp.bfloat16)

  def saved(params, x):
    f = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    return jax.tree.leaves(jax.vjp(f, params, x)[1])

  found = jax.eval_shape(saved, params, x)
  return collections.Counter(
    (a.dtype, a.shape[2:]) for a in found if a.ndim == 4
  )


@pytest.mark.parametrize("over", ["head", "all"])
@pytest.mark.parametrize("kept", ["bf16", "fp8"])
def test_q_and_k_are_saved_once_before_their_norm(over, kept):
  found = saved_of_attention(over, recipes.coat(attention=kept))
  fp8, bf16 = jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)
  groups = num_groups(SIZE, 16)
  want = collections.Counter({(bf16, (HEADS, SIZE)): 1})  # This is the output.
  heads = HEADS, HEADS // 2  # q and k are always saved in FP8.
  if kept == "fp8":
    heads += (HEADS // 2,)
  else:
    want[bf16, (HEADS // 2, SIZE)] += 1
  for n in heads:
    want[fp8, (n, SIZE)] += 1
    want[bf16, (n, groups)] += 1
  assert found == want
