# SPDX-License-Identifier: Apache-2.0
"""Tests learned positions: packed documents, meshes, and length limits."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models.params import mesh_axes
from tests.comparing import assert_close, jit
from tests.models.test_cache import CONFIGS, V, build
from tests.train.steps import SMALL, gpt2, on
from train.mesh import make_mesh, parse_mesh

CONFIG = dataclasses.replace(CONFIGS["gpt2"], max_positions=16)
# Lengths of documents in each row.
LENGTHS = ((7, 5), (2, 10), (12,), (4, 3, 5))


def pulled(model, dhidden):
  """Returns a function from tokens to hidden states and weight gradients."""
  graph, params = nnx.split(model, nnx.Param)
  params = nnx.to_pure_dict(params)

  def run(params, tokens, segments, dhidden):
    hidden, pull = jax.vjp(
      lambda p: nnx.merge(graph, p)(tokens, segments), params
    )
    return hidden, pull(dhidden)[0]

  run = jit(run)
  return lambda tokens, segments=None, dhidden=dhidden: run(
    params, tokens, segments, dhidden
  )


@pytest.mark.parametrize(
  "sizes", ["", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.slow)]
)
def test_packed_documents_match_separate_rows(sizes):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, (4, 12), np.int32)
  segments = np.stack([np.repeat(np.arange(len(n)), n) for n in LENGTHS])
  segments = segments.astype(np.int32)
  dhidden = rng.normal(size=(4, 12, CONFIG.d_model)).astype(np.float32)
  recipe, mesh = recipes.bf16(), make_mesh(parse_mesh(sizes))
  want_model = build(CONFIG, recipe)
  if mesh is not None:
    recipe = dataclasses.replace(recipe, axes=mesh_axes(mesh.shape))
  with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    model = build(CONFIG, recipe, mesh=mesh)
    hidden, gradients = pulled(model, dhidden)(tokens, segments)
  # Run each document alone at the start of a row; later tokens have no effect.
  alone, row_of = pulled(want_model, dhidden), np.zeros((1, 12), np.int32)
  want = np.zeros_like(hidden)
  total = jax.tree.map(np.zeros_like, gradients)
  for b, lengths in enumerate(LENGTHS):
    for n, end in zip(lengths, np.cumsum(lengths), strict=True):
      here = slice(end - n, end)
      row = row_of.copy()
      row[0, :n] = tokens[b, here]
      part = np.zeros((1, 12, CONFIG.d_model), np.float32)
      part[0, :n] = dhidden[b, here]
      found, more = alone(row, dhidden=part)
      want[b, here] = found[0, :n]
      total = jax.tree.map(np.add, total, more)
  assert_close(hidden, want, 1e-5)
  assert_close(gradients, total, 1e-5)


def test_sequence_that_is_too_long_is_refused():
  model = build(CONFIG, recipes.bf16())
  tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
  words = r"tokens \[2, 17\]: gpt2 has learned positions for 16 tokens, got 17"
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(model, tokens)
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(model, tokens, tokens)
  with pytest.raises(ValueError, match=r"seq: gpt2 has .* 32 tokens, got 64"):
    dataclasses.replace(gpt2(SMALL), seq=64)


def test_positions_that_a_mesh_cannot_split_are_refused():
  config = gpt2(SMALL)
  odd = dataclasses.replace(config.model, max_positions=36)
  with pytest.raises(ValueError, match="must divide max_positions, got fsdp=8"):
    on(dataclasses.replace(config, model=odd), "fsdp=8")
