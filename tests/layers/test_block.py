# SPDX-License-Identifier: Apache-2.0
"""Tests options that all blocks share, and a block with a custom middle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import ops, recipes
from coat_jax.layers import (
  MLP,
  Attention,
  BlockWeights,
  LinearWeights,
  Middle,
  MiddleGradient,
  MiddleOutput,
  NormLinear,
  RMSNorm,
  block,
)
from coat_jax.layers.operands import gradient_operand
from coat_jax.layers.residuals import save_residual
from coat_jax.ops import Groups
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.matrices import quick

D, F, G = 24, 40, 16
UNGATED = functools.partial(MLP, activation="gelu_tanh", gated=False)


@dataclasses.dataclass(frozen=True)
class Scaled(Middle):
  """A custom middle that multiplies each column by a weight."""

  def plain(self, h, weights, inputs, recipe):
    return h * weights.reshape(1, 1, -1)

  def forward(self, h, weights, inputs, recipe):
    h = save_residual("activation", ops.quantize_groups(h, groups=Groups(G)))
    out = ops.quantize_tensor(self._values(h) * self._row(weights))
    return MiddleOutput(out, (h, save_residual("linear", out.scale)))

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    values, scale = self._values(saved[0]), saved[1]
    dh = dout.astype(jnp.float32) * self._row(weights)
    return MiddleGradient(
      gradient_operand(dh, recipe),
      ops.quantize_tensor(
        values * self._row(weights), scale=scale, layout="columns"
      ),
      dh if has_bias else None,
      jnp.sum(dout * values, axis=(0, 1)),
    )

  def _values(self, h):
    return h.dequantize()

  def _row(self, weights):
    return weights.reshape(1, 1, -1)


def case(has_bias, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.float32(rng.normal(size=shape))

  front = LinearWeights(normal(D, F), normal(F), normal(D))
  back = LinearWeights(normal(F, D))
  front = front if has_bias else front._replace(bias=None)
  return normal(2, 6, D), BlockWeights(front, back, normal(F)), normal(2, 6, D)


@functools.partial(jit, static_argnames=("kind", "add_input"))
def layer(x, weights, dy, kind, add_input):
  def f(x, weights):
    return block(
      x,
      weights,
      middle=Scaled(),
      kind=kind,
      eps=1e-5,
      add_input=add_input,
      recipe=recipes.coat(),
    )

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@functools.partial(jit, static_argnames=("kind", "add_input"))
def oracle(x, weights, dy, kind, add_input):
  def f(x, weights):
    front, back, scales = weights
    y = x
    if kind is not None:
      y = straight_through.norm(x, front.gamma, None, kind, 1e-5)
    h = straight_through.linear(y, front.w, front.bias)
    h = straight_through.per_group(h) * scales.reshape(1, 1, -1)
    y = straight_through.linear(h, back.w)
    return x + y if add_input else y

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@pytest.mark.parametrize(
  "kind, add_input, has_bias",
  [("rms", True, True), (None, True, False), (None, False, True)],
)
def test_block_with_a_custom_middle_matches_its_parts(
  kind, add_input, has_bias
):
  x, weights, dy = case(has_bias)
  if kind is None:
    front = weights.front._replace(gamma=None)
    weights = weights._replace(front=front)
  found = layer(x, weights, dy, kind, add_input)
  wanted = oracle(x, weights, dy, kind, add_input)
  assert_same_bits(found[0], wanted[0])
  assert_close(found[1], wanted[1])


@pytest.mark.parametrize("make", [MLP, UNGATED, Attention])
@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.coat()])
def test_modules_can_omit_norm_and_residual_add(make, recipe):
  width = 2 if make is Attention else F  # Number of heads, or of columns.

  def build(**options):
    return make(D, width, recipe=recipe, rngs=nnx.Rngs(0), **options)

  whole, bare = build(), build(norm=None, add_input=False)
  paths = [
    [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(m)]
    for m in (nnx.state(whole, nnx.Param), nnx.state(bare, nnx.Param))
  ]
  assert paths[1] == [path for path in paths[0] if "norm" not in path]

  @jit
  def outputs(bare, unnormed, x):
    return bare(x), x + bare(x), unnormed(x)

  x = jax.random.normal(jax.random.key(1), (2, 6, D), jnp.float32)
  options = dict(dtype=jnp.float32)
  bare = build(norm=None, add_input=False, **options)
  y, added, wanted = outputs(bare, build(norm=None, **options), x)
  assert jnp.any(y)
  # Only `unnormed` adds x inside the block, so f32 roundings may differ.
  assert_close(added, wanted, 1e-6)


@pytest.mark.parametrize(
  "make", quick(1, [MLP, UNGATED, Attention, NormLinear])
)
def test_blocks_multiply_by_one_plus_scale(make):
  width = 2 if make is Attention else F  # Number of heads, or of columns.
  build = functools.partial(make, D, width, dtype=jnp.float32)
  scale = jax.random.normal(jax.random.key(2), D) / 4
  x, dy = jax.random.normal(jax.random.key(1), (2, 2, 6, D))
  dy = jnp.resize(dy, (2, 6, F)) if make is NormLinear else dy

  @jit
  def run(m, scale, x, dy):
    graph, params, others = nnx.split(m, nnx.Param, ...)

    def f(params, scale, x):
      m = nnx.merge(graph, params, others)
      norm = m.qkv.norm if make is Attention else m.norm
      norm.scale[...] = scale
      return m(x)

    y, vjp = jax.vjp(f, params, scale, x)
    return y, vjp(dy)[1:]

  gemma = build(scale_plus_one=True, rngs=nnx.Rngs(0))
  found = run(gemma, scale, x, dy)
  wanted = run(build(rngs=nnx.Rngs(0)), 1 + scale, x, dy)
  assert_same_bits(found, wanted)


class AddedNorm(nnx.Module):
  """Computes x + norm(block(x)), for a block with add_input=False."""

  def __init__(self, block, norm):
    self.block, self.norm = block, norm

  def __call__(self, x):
    return x + self.norm(self.block(x))


@pytest.mark.parametrize(
  "make, recipe, norm",
  [
    pytest.param(Attention, recipes.coat(), None),
    *quick(
      0,
      [
        (make, recipe, norm)
        for make in (Attention, MLP, UNGATED)
        for recipe, norm in [
          (recipes.bf16(), None),
          (recipes.fp8_linear(), "rms"),
          (recipes.coat(residuals="coat", attention="fp8"), "rms"),
        ]
      ],
    ),
  ],
)
def test_post_norm_matches_a_norm_after_the_block(make, recipe, norm):
  width = 2 if make is Attention else F  # Number of heads, or of columns.
  shared = dict(recipe=recipe, epsilon=1e-2, dtype=jnp.float32)
  rngs = nnx.Rngs(0)
  options = dict(norm=norm, use_bias=True, rngs=rngs, **shared)
  whole = make(D, width, post_norm="rms", scale_plus_one=True, **options)
  scale = jax.random.normal(jax.random.key(2), D) / 4
  whole.post_norm.scale[...] = scale
  x, dy = jax.random.normal(jax.random.key(1), (2, 2, 6, D))
  bare = make(
    D, width, add_input=False, scale_plus_one=norm is not None, **options
  )
  post_norm = RMSNorm(D, scale_plus_one=True, rngs=rngs, **shared)
  parts = AddedNorm(bare, post_norm)

  @jit
  def run(whole, parts, x, dy):
    def of(module, params):
      graph = nnx.split(module, nnx.Param)[0]
      f = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
      y, vjp = jax.vjp(f, params, x)
      return y, vjp(dy)

    own = nnx.to_pure_dict(nnx.split(whole, nnx.Param)[1])
    rest = {name: p for name, p in own.items() if name != "post_norm"}
    return of(whole, own), of(parts, dict(block=rest, norm=own["post_norm"]))

  (y, (dw, dx)), (want, (want_dw, want_dx)) = run(whole, parts, x, dy)
  assert_close(y, want, 1e-6)
  dnorm = dw.pop("post_norm")
  # XLA may round a * b + c once in one program and twice in the other. This
  # changes f32 results, but no code.
  assert_close((dx, dw, dnorm), (want_dx, want_dw["block"], want_dw["norm"]))
