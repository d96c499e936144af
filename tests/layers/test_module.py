# SPDX-License-Identifier: Apache-2.0
"""Tests recipes, evaluation mode and constructors of all modules."""

import doctest
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  Attention,
  LayerNorm,
  Linear,
  NormLinear,
  RMSNorm,
)
from coat_jax.layers.module import RecipeModule
from coat_jax.models.decoder import Decoder
from tests.comparing import assert_same_bits

D = 24
MODULES = {
  "Linear": lambda **k: Linear(D, 40, **k),
  "RMSNorm": lambda **k: RMSNorm(D, **k),
  "LayerNorm": lambda **k: LayerNorm(D, **k),
  "NormLinear": lambda **k: NormLinear(D, 40, **k),
  "MLP": lambda **k: MLP(D, 40, **k),
  "UngatedMLP": lambda **k: MLP(
    D, 40, activation="gelu_tanh", gated=False, **k
  ),
  "Attention": lambda **k: Attention(D, 3, clip_qkv=8.0, **k),
}


def make(name, recipe=None):
  return MODULES[name](recipe=recipe, rngs=nnx.Rngs(0))


def program(module):
  """Returns the jaxpr of a module as text."""
  jaxpr = jax.make_jaxpr(lambda x: module(x))(inputs())
  return re.sub("0x[0-9a-f]+", "", str(jaxpr))


def inputs():
  return jax.random.normal(jax.random.key(0), (2, 6, D), jnp.bfloat16)


@pytest.mark.parametrize("name", MODULES)
def test_evaluation_uses_the_training_recipe_or_bf16(name):
  plain = program(make(name, recipes.bf16()))
  for evaluation in ("same", "bf16"):
    m = make(name, recipes.coat(evaluation=evaluation))
    training = program(m)
    assert training != plain and "f8_e4m3" in training
    m.eval()
    assert program(m) == (training if evaluation == "same" else plain)
    m.train()
    assert program(m) == training


def test_eval_reaches_submodules():
  class Model(nnx.Module):
    def __init__(self):
      recipe = recipes.fp8_linear(evaluation="bf16")
      self.linear = Linear(D, D, recipe=recipe, rngs=nnx.Rngs(0))

    def __call__(self, x):
      return self.linear(x)

  model, x = Model(), inputs()
  training = model(x)
  model.eval()
  want = x @ model.linear.kernel[...].astype(jnp.bfloat16)
  assert_same_bits(model(x), want)
  assert jnp.any(training != want)


@pytest.mark.parametrize("name", MODULES)
def test_all_recipes_have_the_same_parameters(name):
  states = [
    nnx.state(make(name, recipe))
    for recipe in (None, recipes.bf16(), recipes.fp8_linear())
  ]
  for state in states[1:]:  # Any recipe can load another's checkpoint.
    assert jax.tree.structure(state) == jax.tree.structure(states[0])
    assert_same_bits(state, states[0])
  assert make(name).recipe == recipes.coat()


@pytest.mark.parametrize("name", MODULES)
def test_every_layer_accepts_empty_batches_and_sequences(name):
  for recipe, shape in (
    (recipes.coat(residuals="coat"), (0, 6, D)),
    (recipes.bf16(), (0, 6, D)),
    (recipes.bf16(), (2, 0, D)),
    (recipes.coat(attention="fp8"), (2, 0, D)),
  ):
    graph, params = nnx.split(make(name, recipe))

    def run(params, x, graph=graph):
      y, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)
      return y, vjp(y)

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    y, (_, dx) = jax.eval_shape(run, params, x)
    assert y.shape[:2] == shape[:2] and dx.shape == x.shape


def test_preset_that_was_not_called_is_refused():
  # In tests, the type checker may raise its own error first.
  for make_module in MODULES.values():
    with pytest.raises(TypeError):
      make_module(recipe=recipes.coat, rngs=nnx.Rngs(0))

  class Own(RecipeModule):
    __init__ = inspect.unwrap(RecipeModule.__init__)

  with pytest.raises(
    TypeError, match=r"Own: recipe must be .*; call a preset, as in"
  ):
    Own(
      recipe=recipes.coat,
      dtype=jnp.bfloat16,
      param_dtype=jnp.float32,
      rngs=nnx.Rngs(0),
    )


CLASSES = [Linear, RMSNorm, LayerNorm, NormLinear, MLP, Attention]


@pytest.mark.parametrize("module", [*CLASSES, Decoder])
def test_module_documents_its_arguments_and_has_an_example(module):
  documented = inspect.getdoc(module.__init__) or ""
  _, *arguments = inspect.signature(module.__init__).parameters.values()
  names = [
    f"**{a.name}" if a.kind == a.VAR_KEYWORD else a.name for a in arguments
  ]
  assert [name for name in names if f"\n  {name}: " not in documented] == []
  (example,) = doctest.DocTestFinder(recurse=False).find(module, globs={})
  assert len(example.examples) > 4
  runner = doctest.DocTestRunner()
  # Trace the example instead of running it; it prints only shapes.
  jax.eval_shape(lambda: runner.run(example) and None)
  assert runner.failures == 0
