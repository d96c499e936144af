# SPDX-License-Identifier: Apache-2.0
"""Compares a stack of layers of several kinds with modules of one kind each."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  Attention,
  LinearScaling,
  Llama3Scaling,
  YarnScaling,
)
from tests.comparing import assert_close, jit
from tests.matrices import quick

D, T = 24, 8
WINDOWS, THETAS = (3, None), (1e2, 1e3)
SCALINGS = (
  None,
  YarnScaling(factor=4.0, original_max_position_embeddings=64),
)


def build(seed, recipe, **options):
  return Attention(
    D,
    4,
    num_kv_heads=2,
    recipe=recipe,
    dtype=jnp.float32,
    rngs=nnx.Rngs(seed),
    **options,
  )


def arrays(*seeds, shape=(2, T, D)):
  return [jax.random.normal(jax.random.key(i), shape) for i in seeds]


def stacked(layers):
  return jax.tree.map(lambda *x: jnp.stack(x), *layers)


@pytest.mark.parametrize(
  "recipe, qk_norm",
  quick(
    0,
    [
      (recipes.coat(), "head"),
      (recipes.coat(residuals="coat", attention="fp8"), None),
      (recipes.bf16(), "all"),
      (recipes.fp8_linear(), None),
    ],
  ),
)
def test_scanned_layers_of_two_kinds_match_separate_ones(recipe, qk_norm):
  order = [0, 1, 0]
  options = dict(rope_theta=THETAS, rope_scaling=SCALINGS, window=WINDOWS)
  shared = dict(soft_cap=5.0, qk_norm=qk_norm)
  # Each separate layer has only the options of its kind.
  alone = [
    build(i, recipe, **shared, **{name: x[kind] for name, x in options.items()})
    for i, kind in enumerate(order)
  ]
  graphs, params = zip(*(nnx.split(m, nnx.Param) for m in alone), strict=True)
  graph = nnx.split(build(0, recipe, **shared, **options), nnx.Param)[0]

  def one_by_one(params, x):
    for graph, p in zip(graphs, params, strict=True):
      x = nnx.merge(graph, p)(x)
    return x

  def scanned(params, x):
    def step(x, layer):
      p, kind = layer
      return nnx.merge(graph, p)(x, kind=kind), None

    return jax.lax.scan(step, x, (params, jnp.int32(order)))[0]

  def results(f):
    def run(params, x, dy):
      y, vjp = jax.vjp(f, params, x)
      return y, vjp(dy)

    return jit(run)

  x, dy = arrays(1, 2)
  want, (dparams, dx) = results(one_by_one)(params, x, dy)
  found = results(scanned)(stacked(params), x, dy)
  # The two programs compute angles from different constants, so cos and sin may
  # differ by an ulp.
  assert_close(found, (want, (stacked(dparams), dx)), 5e-5)


def jaxpr_of(m):
  graph, params = nnx.split(m, nnx.Param)

  def run(params, x):
    y, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)
    return vjp(y)

  return str(jax.make_jaxpr(run)(params, arrays(1)[0]))


def test_layers_of_one_kind_need_no_switch():
  same = build(
    0, recipes.coat(), window=(3, 3), rope_theta=(1e4, 1e4), rope_scaling=None
  )
  text = jaxpr_of(same)
  assert "cond[" not in text
  assert text == jaxpr_of(build(0, recipes.coat(), window=3))


@pytest.mark.slow
def test_layers_may_differ_in_rope_alone():
  recipe = recipes.bf16()
  m = build(0, recipe, rope_theta=(1e4, None))
  x = arrays(1)[0]
  for kind, theta in enumerate((1e4, None)):
    found = jit(lambda m, x, kind: m(x, kind=kind))(m, x, jnp.int32(kind))
    want = jit(lambda m, x: m(x))(build(0, recipe, rope_theta=theta), x)
    assert_close(found, want, 1e-6)


@pytest.mark.slow
def test_attention_passes_scalings_to_rope():
  x = arrays(1)[0]
  ys = []
  for scaling in (
    None,
    LinearScaling(factor=2.0),
    Llama3Scaling(
      factor=2.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8,
    ),
  ):
    m = build(0, recipes.bf16(), rope_scaling=scaling)
    positions = 2 * jnp.arange(T, dtype=jnp.int32)
    run = jit(lambda m, x, positions: m(x, positions))
    ys.append((run(m, x, positions), run(m, x, positions // 2)))
  # Halving the frequencies has the same effect as halving the positions.
  assert_close(ys[1][0], ys[0][1], 1e-6)
  for others in (ys[0][0], ys[1][0]):
    assert jnp.max(jnp.abs(ys[2][0] - others)) > 1e-3


def test_positions_and_segments_may_have_the_leading_axes_of_x():
  m = build(0, recipes.bf16())
  x = arrays(1, shape=(2, 1, T, D))[0]
  positions = jnp.arange(T, dtype=jnp.int32) % 5
  segments = jnp.arange(T, dtype=jnp.int32) // 5
  run = jit(lambda m, *args: m(*args))
  many = [jnp.broadcast_to(a, (2, 1, T)) for a in (positions, segments)]
  found = run(m, x, *many)
  assert_close(found, run(m, x[:, 0], *(a[:, 0] for a in many))[:, None], 1e-6)
  # Each document is computed as if it were alone.
  first, second = run(m, x[0, :, :5]), run(m, x[0, :, 5:])
  assert_close(found[0], jnp.concatenate([first, second], axis=1), 1e-5)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(window=(3, None), rope_theta=(1e4, 1e4, 1e4)), "one entry for each"),
    (dict(window=()), "one entry for each kind of layer, got {'window': 0}"),
    (dict(window=0), "window must be at least 1"),
    (dict(window=4, causal=False), "needs causal=True"),
    (dict(soft_cap=-1.0), "soft_cap must be above 0"),
    (dict(rope_theta=None, rotary_dim=4), "need RoPE.*pass rope_theta"),
    (
      dict(rope_theta=None, rope_scaling=LinearScaling(factor=2.0)),
      "need RoPE.*pass rope_theta",
    ),
    (dict(rotary_dim=8), "at most head_dim=6, got 8"),
  ],
)
def test_invalid_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    nnx.eval_shape(lambda: build(0, recipes.coat(), **options))


def test_positions_of_another_length_are_refused():
  m = build(0, recipes.coat(), window=WINDOWS)
  with pytest.raises(ValueError, match=r"positions \[T\] or \[B, T\]"):
    jax.eval_shape(m, arrays(1)[0], jnp.zeros((1, T), jnp.int32))


def test_unknown_norms_of_q_and_k_are_refused():
  # Turn off the tests' type checks, which users do not have.
  class Unchecked(Attention):
    __init__ = inspect.unwrap(Attention.__init__)

  with pytest.raises(ValueError, match="'head', 'all', None, got 'rows'"):
    Unchecked(D, 4, qk_norm="rows", rngs=nnx.Rngs(0))


def test_switch_between_kinds_saves_only_the_number_of_the_kind():
  def saved(kind=None, **options):
    m = nnx.eval_shape(
      lambda: build(0, recipes.coat(), qk_norm="head", **options)
    )
    graph, params = nnx.split(m, nnx.Param)

    def run(params, x, kind):
      f = lambda p, x: nnx.merge(graph, p)(x, kind=kind)  # noqa: E731
      return jax.tree.leaves(jax.vjp(f, params, x)[1])

    found = jax.eval_shape(run, params, arrays(1)[0], kind)
    return sorted((str(a.dtype), a.shape) for a in found)

  found = saved(jnp.int32(0), window=WINDOWS, rope_theta=THETAS)
  # All other arrays are saved once, not once for each kind.
  assert found == sorted([*saved(window=3), ("int32", ())])
