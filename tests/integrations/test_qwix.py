# SPDX-License-Identifier: Apache-2.0
"""Tests CoatProvider, which makes qwix run a model's matmuls in FP8."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import coat_jax.integrations.qwix
from coat_jax import layers, recipes
from coat_jax.integrations.qwix import CoatProvider
from coat_jax.layers import linear
from coat_jax.layers.count import saved_bytes
from tests.docs.pages import DOCS

BF16 = jnp.bfloat16


class Model(nnx.Module):
  """Three kinds of layers multiply by weights; attention has no weights."""

  def __init__(self, rngs):
    options = dict(rngs=rngs, dtype=BF16, param_dtype=BF16)
    self.up = nnx.Linear(64, 256, use_bias=False, **options)
    self.heads = nnx.Einsum("btf,fnh->btnh", (256, 4, 16), **options)
    self.down = nnx.LinearGeneral(
      (4, 16), 64, axis=(-2, -1), use_bias=False, **options
    )

  def __call__(self, x):
    q = self.heads(self.up(x))
    scores = jnp.einsum("btnh,bsnh->bnts", q, q)
    return self.down(jnp.einsum("bnts,bsnh->btnh", scores, q))


def apply_with(p, x, product):
  """Computes what Model does, but multiplies by weights with `product`."""
  q = product(product(x, p["up"]["kernel"][...]), p["heads"]["kernel"][...])
  q = q + p["heads"]["bias"][...] if "bias" in p["heads"] else q
  scores = jnp.einsum("btnh,bsnh->bnts", q, q)
  y = jnp.einsum("bnts,bsnh->btnh", scores, q).reshape(*x.shape[:2], -1)
  return product(y, p["down"]["kernel"][...].reshape(64, 64))


@pytest.fixture
def model():
  return Model(nnx.Rngs(0))


X = jax.random.normal(jax.random.key(0), (2, 8, 64), BF16)


def test_matmuls_with_weights_match_linear(model):
  fp8 = qwix.quantize_model(model, CoatProvider(), X)
  want = apply_with(
    nnx.state(model, nnx.Param),
    X,
    lambda x, w: linear(x, w, recipe=recipes.coat()),
  )
  np.testing.assert_array_equal(fp8(X), want)
  assert not np.array_equal(fp8(X), model(X))


def test_matmuls_that_no_rule_selects_are_unchanged(model):
  rules = [qwix.QuantizationRule(module_path="nothing")]
  same = qwix.quantize_model(model, CoatProvider(rules), X)
  np.testing.assert_array_equal(same(X), model(X))


def test_fp8_is_saved_for_the_backward_pass(model):
  fp8 = qwix.quantize_model(model, CoatProvider(), X)
  graph, state = nnx.split(fp8)
  _, backward = jax.vjp(lambda x, s: nnx.merge(graph, s)(x), X, state)
  saved = [
    a.size for a in jax.tree.leaves(backward) if a.dtype == jnp.float8_e4m3fn
  ]
  assert sorted(saved) == [16 * 64, 16 * 64, 16 * 256]


def test_gradients_match_linear(model):
  fp8 = qwix.quantize_model(model, CoatProvider(), X)

  def loss(y):
    return jnp.sum(y.astype(jnp.float32) ** 2)

  graph, state, rest = nnx.split(fp8, nnx.Param, ...)
  got = jax.grad(lambda s: loss(nnx.merge(graph, s, rest)(X)))(state)

  def loss_with_linear(state):
    product = lambda x, w: linear(x, w, recipe=recipes.coat())  # noqa: E731
    return loss(apply_with(state, X, product))

  want = jax.grad(loss_with_linear)(state)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
  "subscripts, shapes",
  [
    ("td,df->ft", [(8, 64), (64, 32)]),
    ("tt,td->td", [(8, 8), (8, 64)]),
    ("td,fd->t", [(8, 64), (32, 64)]),
  ],
)
def test_other_einsums_are_left_alone(subscripts, shapes):
  class Other(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(shapes[1], BF16))

    def __call__(self, x):
      return jnp.einsum(subscripts, x, self.w[...])

  x = jax.random.normal(jax.random.key(1), shapes[0], BF16)
  provider = CoatProvider([qwix.QuantizationRule(op_names=("einsum",))])
  same = qwix.quantize_model(Other(), provider, x)
  np.testing.assert_array_equal(same(x), Other()(x))


def test_example_runs():
  assert doctest.testmod(coat_jax.integrations.qwix).failed == 0


class MLP(nnx.Module):
  """The MLP in the table of docs/howto/qwix.md."""

  def __init__(self, rngs):
    options = dict(use_bias=False, dtype=BF16, rngs=rngs)
    self.norm = nnx.RMSNorm(256, dtype=BF16, rngs=rngs)
    self.gate = nnx.Linear(256, 1024, **options)
    self.up = nnx.Linear(256, 1024, **options)
    self.down = nnx.Linear(1024, 256, **options)

  def __call__(self, x):
    y = self.norm(x)
    return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Stack(nnx.Module):
  def __init__(self):
    self.mlp = MLP(nnx.Rngs(0))

  def __call__(self, x):
    return self.mlp(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # From qwix.
def test_page_shows_what_each_version_saves():
  x = jnp.zeros((1, 512, 256), BF16)
  e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
  rule = qwix.QtRule(
    module_path=".*", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2
  )
  converted, _ = layers.convert(Stack(), blocks={MLP: layers.MLP}, inputs=(x,))
  page = (DOCS / "howto/qwix.md").read_text()
  for row, model in {
    "BF16": Stack(),
    "qwix 0.1.8": qwix.quantize_model(Stack(), qwix.QtProvider([rule]), x),
    "`CoatProvider`": qwix.quantize_model(Stack(), CoatProvider(), x),
    "`layers.convert(": converted,
  }.items():
    cells = next(x for x in page.splitlines() if x.startswith(f"| {row}"))
    saved = round(saved_bytes(model, (x,)) / 512)
    assert cells.split("|")[3].strip() == f"{saved:,}", row
