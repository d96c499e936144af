# SPDX-License-Identifier: Apache-2.0
"""Models written with flax's layers, for tests of `convert`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax import layers
from coat_jax.layers import convert
from tests.comparing import jit

D, F, HEADS, T, VOCABULARY = 32, 64, 4, 16, 61

# Models ---------------------------------------------------------------------


class FeedForward(nnx.Module):
  """A gated MLP with neither norm nor residual add, as in flax's Gemma."""

  def __init__(self, *, dtype=None, activation=nnx.silu, rngs):
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype)
    # These names and their order mislead: `convert` must not rely on them.
    self.down = linear(F, D, rngs=rngs)
    self.a = linear(D, F, rngs=rngs)
    self.b = linear(D, F, rngs=rngs)
    self.activation = activation
    self.hidden = F

  def __call__(self, x):
    return self.down(self.activation(self.b(x)) * self.a(x))


class MLP(nnx.Module):
  """An MLP with a norm before it and a residual add, as in GPT-2."""

  def __init__(self, *, dtype=None, activation=nnx.gelu, rngs):
    self.norm = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
    self.up = nnx.Linear(D, F, dtype=dtype, rngs=rngs)
    self.down = nnx.Linear(F, D, dtype=dtype, rngs=rngs)
    self.activation = activation

  def __call__(self, x):
    return x + self.down(self.activation(self.up(self.norm(x))))


class Head(nnx.Module):
  """A norm and a linear layer."""

  def __init__(self, *, dtype=None, rngs):
    self.norm = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(D, VOCABULARY, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    return self.out(self.norm(x))


class Attention(nnx.Module):
  """Attention built from LinearGeneral (one or two input axes) and Einsum."""

  def __init__(self, *, dtype=None, rngs):
    h = D // HEADS
    options = dict(dtype=dtype, use_bias=False, rngs=rngs)
    self.q = nnx.LinearGeneral(D, (HEADS, h), **options)
    self.kv = nnx.Einsum(
      "btd,sdnh->sbtnh", (2, D, HEADS, h), dtype=dtype, rngs=rngs
    )
    self.out = nnx.LinearGeneral((HEADS, h), D, axis=(-2, -1), **options)

  def __call__(self, x):
    k, v = self.kv(x)
    y = jax.nn.dot_product_attention(self.q(x), k, v, is_causal=True)
    return self.out(y)


class Layer(nnx.Module):
  def __init__(self, *, dtype=None, rngs):
    self.norm1 = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
    self.attention = Attention(dtype=dtype, rngs=rngs)
    self.norm2 = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
    self.mlp = FeedForward(dtype=dtype, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm1(x))
    return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
  """A small model that maps tokens to logits."""

  def __init__(self, *, dtype=None, rngs):
    self.embed = nnx.Embed(VOCABULARY, D, dtype=dtype, rngs=rngs)
    self.layers = nnx.List([Layer(dtype=dtype, rngs=rngs) for _ in range(2)])
    self.head = Head(dtype=dtype, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for layer in self.layers:
      x = layer(x)
    return self.head(x)


class Stranger(nnx.Module):
  """A model with modules in lists and dicts, and shared and stacked modules."""

  def __init__(self, *, rngs):
    shared = nnx.Linear(D, D, rngs=rngs)
    self.parts = nnx.data(
      {"in": [shared, (nnx.LayerNorm(D, rngs=rngs),)], "again": shared}
    )
    self.names = nnx.Dict(last=shared)
    self.steps = nnx.Sequential(shared, jnp.tanh)
    # Two modules share one parameter.
    self.tied = nnx.Linear(D, D, rngs=rngs)
    self.tied.kernel = shared.kernel

    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
      return MLP(rngs=rngs)

    self.stack = stack(rngs.split(3))

  def __call__(self, x):
    first, (norm,) = self.parts["in"]
    x = norm(first(x)) + self.parts["again"](x) + self.names.last(x)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(mlp, x):
      return mlp(x)

    return self.tied(self.steps(run(self.stack, x)))


def flat_state(model):
  """Maps each variable's path to its type, shape, dtype and metadata."""
  return {
    path: (type(x), x.shape, x.dtype, x.get_metadata())
    for path, x in nnx.to_flat_state(nnx.state(model))
  }


def tokens():
  return jnp.arange(2 * T).reshape(2, T) % 7


def activations(*shape):
  return jax.random.normal(jax.random.key(9), shape or (2, T, D))


def relative(got, want):
  """Returns the norm of the error divided by the norm of `want`."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


BLOCKS = {FeedForward: layers.MLP, Head: layers.NormLinear}
MODELS = {
  "mlp": (lambda rngs: MLP(rngs=rngs), {MLP: layers.MLP}, activations),
  "transformer": (lambda rngs: Transformer(rngs=rngs), BLOCKS, tokens),
  "stranger": (
    lambda rngs: Stranger(rngs=rngs),
    {MLP: layers.MLP},
    activations,
  ),
}
CASES = [(name, has) for name in MODELS for has in (False, True)]


def converted(name, has_blocks, recipe=None):
  make, blocks, inputs = MODELS[name]
  model = make(nnx.Rngs(0))
  new, report = convert(model, recipe, blocks=blocks if has_blocks else {})
  return model, new, report, inputs()


def run(model, x):
  graph, state = nnx.split(model)
  return jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
