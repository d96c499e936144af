# SPDX-License-Identifier: Apache-2.0
"""What jax.checkpoint keeps of a layer, and that it changes no gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax.models import decoder
from tests.matrices import quick
from tests.train import runs
from train import mesh as meshes
from train import step
from train.presets import PRESETS

TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33), np.int32)


def build(**options):
  """A tiny run's model, as a loss of its parameters, and those."""
  demo = PRESETS["demo"]()
  config = dataclasses.replace(
    demo,
    model=dataclasses.replace(demo.model, **runs.MODEL),
    batch=8,
    seq=32,
    implementation="xla",
    **options,
  )
  graph = step.build_graph(config)
  abstract = step.abstract_state(config, step.build_optimizer(config)).params
  random = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: random.normal(0, 0.1, x.shape).astype(x.dtype), abstract
  )

  def loss(params):
    return decoder.loss_fn(nnx.merge(graph, params), jnp.asarray(TOKENS))

  return loss, params


def kept_bytes(loss, params):
  """What layers keep of all tokens, beside parameters and casts of them."""
  residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
  shapes = {p.shape for p in jax.tree.leaves(params)}
  of_layers = runs.MODEL["num_layers"] * TOKENS[:, 1:].size
  return sum(
    x.size * x.dtype.itemsize
    for x in jax.tree.leaves(residuals)
    if x.shape[:1] == (runs.MODEL["num_layers"],)
    and x.shape not in shapes
    and x.size % of_layers == 0
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "recipe, remat",
  quick(1, [("coat", "full"), ("bf16", "dots"), ("bf16", "full")]),
)
def test_what_is_kept_changes_no_gradient(recipe, remat):
  # In f32 the second forward is the first; FP8 codes are the same codes.
  options = dict(recipe=recipe)
  options |= dict(compute="float32") if recipe == "bf16" else {}
  loss, params = build(**options)
  want = jax.jit(jax.value_and_grad(loss))(params)
  loss, _ = build(**options, remat=remat)
  got = jax.jit(jax.value_and_grad(loss))(params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
    got,
    want,
  )


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_how_much_is_kept(recipe):
  none, dots, full = (
    kept_bytes(*build(recipe=recipe, remat=remat))
    for remat in ("none", "dots", "full")
  )
  # COAT keeps less than the BF16 results of its products.
  assert (none < dots) == (recipe == "coat")
  layers, d_model = runs.MODEL["num_layers"], runs.MODEL["d_model"]
  assert full == TOKENS[:, 1:].size * layers * d_model * 2 < min(none, dots)


def test_rows_of_other_devices_are_not_kept():
  mesh = meshes.make_mesh(meshes.parse_mesh("fsdp=8"))
  loss, params = build(recipe="bf16", mesh="fsdp=8")
  with jax.set_mesh(mesh):
    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
  weights = [
    x
    for x in jax.tree.leaves(residuals)
    if x.dtype == jnp.bfloat16 and x.shape[-1] == runs.MODEL["d_ff"]
  ]
  # Gate, up and their product are; a weight has no axis of 8 sequences.
  assert weights and all(8 in x.shape for x in weights)
