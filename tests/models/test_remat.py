# SPDX-License-Identifier: Apache-2.0
"""Tests what layers save with each `remat`, and that gradients do not change.

remat="fp8_layer" is compared with a loop over layers in plain autodiff. The
loop rounds the residual stream, with a straight-through gradient.
"""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import with_weight_cache
from coat_jax.models.batch import Batch
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn, loss_of_hidden
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers.straight_through import pin
from tests.matrices import quick
from tests.train import runs
from train import mesh as meshes
from train import step
from train.memory.count import saved_bytes
from train.presets import PRESETS

TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33), np.int32)
MODEL = runs.MODEL | dict(num_heads=4, num_kv_heads=2)
LAYERS, WIDTH = MODEL["num_layers"], MODEL["d_model"]


# A model with two kinds of layers, and with post norms.
GEMMA = dict(
  family="gemma3_text",
  window=8,
  full_every=2,
  window_rope_theta=100.0,
  attention_soft_cap=5.0,
  logits_soft_cap=10.0,
)


def configure(*, model=None, **options):
  """Configures a tiny run."""
  demo = PRESETS["demo"]()
  return dataclasses.replace(
    demo,
    model=dataclasses.replace(demo.model, **MODEL | (model or {})),
    batch=8,
    seq=32,
    implementation="xla",
    **options,
  )


def build(**options):
  """Returns a loss function of parameters, and random parameters for it."""
  config = configure(**options)
  graph = step.build_graph(config)
  abstract = step.abstract_state(config, step.build_optimizer(config)).params
  random = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: random.normal(0, 0.1, x.shape).astype(x.dtype), abstract
  )

  def loss(params):
    model = nnx.merge(graph, params)
    if "weight_cache" in options:
      model = with_weight_cache(model)
    return loss_fn(model, jnp.asarray(TOKENS))

  return loss, params


def on_mesh(mesh):
  """Sets a mesh such as "fsdp=4"; does nothing for ""."""
  if not mesh:
    return contextlib.nullcontext()
  sizes = meshes.parse_mesh(mesh)
  devices = jax.devices()[: math.prod(sizes.values())]
  return jax.set_mesh(meshes.make_mesh(sizes, devices))


def value_and_grad(loss, params, mesh=""):
  with on_mesh(mesh):
    return jit(jax.value_and_grad(loss))(params)


def kept_bytes(loss, params, mesh=""):
  """Returns the bytes that layers save, without parameters and their casts."""
  with on_mesh(mesh):
    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
  shapes = {p.shape for p in jax.tree.leaves(params)}
  of_layers = LAYERS * TOKENS[:, 1:].size
  return sum(
    x.size * x.dtype.itemsize
    for x in jax.tree.leaves(residuals)
    if x.shape[:1] == (LAYERS,)
    and x.shape not in shapes
    and x.size % of_layers == 0
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "recipe, remat, model",
  quick(
    1,
    [
      ("bf16", "full", None),
      ("bf16", "dots", GEMMA),
      ("coat", "full", GEMMA),
    ],
  ),
)
def test_remat_changes_no_gradient_of_a_decoder(recipe, remat, model):
  # Recipe bf16 computes in f32 here, because rounding in BF16 depends on what
  # the compiler fuses.
  options = dict(recipe=recipe, model=model)
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


@pytest.mark.parametrize(
  "options",
  quick(
    0,
    [
      dict(weight_cache="none"),
      dict(weight_cache="codes", attention="fp8"),
      dict(residuals="coat", attention="fp8"),
      dict(mesh="fsdp=4"),
      dict(mesh="data=2,tensor=2"),
      dict(model=GEMMA),
    ],
  ),
)
def test_recomputing_from_inputs_of_norms_changes_no_gradient(options):
  # The second forward pass reads the codes saved by the first, so it computes
  # the same values.
  mesh = options.get("mesh", "")
  want, got = (
    value_and_grad(*build(**options, remat=remat), mesh)
    for remat in ("none", "fp8")
  )
  if options.get("residuals") == "coat":
    # This recipe saves transposed operands, which are computed again. On a CPU,
    # their matmuls sum in a different order, as with remat="full". A different
    # code would change a value by 6 %, far more than the tolerance.
    assert_same_bits(got[0], want[0])
    assert_close(got[1], want[1], 1e-6)
  else:
    assert_same_bits(got, want)


def rounded(x):
  """Quantizes x in groups of 16 with BF16 scales, and dequantizes it."""
  groups = (
    jax.lax.stop_gradient(x).astype(jnp.float32).reshape(*x.shape[:-1], -1, 16)
  )
  amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
  scale = amax * jnp.float32(1 / 448)
  nearest = scale.astype(jnp.bfloat16)
  above = jnp.nextafter(nearest, jnp.full_like(nearest, jnp.inf))
  nearest_is_below = nearest.astype(jnp.float32) < scale
  scale = jnp.where(nearest_is_below, above, nearest).astype(jnp.float32)
  codes = (groups / scale).astype(jnp.float8_e4m3fn)
  return (codes.astype(jnp.float32) * scale).reshape(x.shape).astype(x.dtype)


def layer_by_layer(**options):
  """Returns the loss function of remat="fp8_layer", as a loop over layers."""
  graph = step.build_graph(configure(**options))

  def loss(params):
    model = nnx.merge(graph, params)
    layers, weights = nnx.split(model.layers)
    batch, kinds = Batch(jnp.asarray(TOKENS)), model.kinds_of_layers
    x, _ = model.start(batch.inputs)
    for i in range(LAYERS):
      layer = nnx.merge(layers, jax.tree.map(lambda w: w[i], weights))  # noqa: B023
      x = layer(pin(x, rounded(x)), kind=None if kinds is None else kinds[i])
    return loss_of_hidden(model, model.norm(x), batch)

  return loss


@pytest.mark.parametrize(
  "options",
  quick(
    1,
    [
      # Use f32, because rounding in BF16 depends on what the compiler fuses.
      dict(recipe="bf16", compute="float32"),
      dict(attention="fp8", residuals="coat"),
      dict(mesh="fsdp=4"),
      dict(mesh="data=2,tensor=2"),
      dict(model=GEMMA),
    ],
  ),
)
def test_fp8_layer_remat_matches_layers_with_rounded_inputs(options):
  mesh = options.get("mesh", "")
  loss, params = build(**options, remat="fp8_layer")
  got = value_and_grad(loss, params, mesh)
  want = value_and_grad(layer_by_layer(**options), params, mesh)
  assert_close(got, want, 1e-5)


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_full_remat_saves_only_the_inputs_of_layers(recipe):
  none, dots, full = (
    kept_bytes(*build(recipe=recipe, remat=remat))
    for remat in ("none", "dots", "full")
  )
  # remat="dots" saves the BF16 results of matmuls. Without remat, recipe coat
  # saves fewer bytes than that, and recipe bf16 saves more.
  assert (none < dots) == (recipe == "coat")
  assert full == TOKENS[:, 1:].size * LAYERS * WIDTH * 2 < min(none, dots)


@pytest.mark.parametrize(
  "remat, mesh",
  quick(
    2,
    [
      ("fp8", ""),
      ("fp8_layer", ""),
      ("fp8", "data=2,tensor=2"),
      ("fp8_layer", "data=2,tensor=2"),
    ],
  ),
)
def test_fp8_remat_saves_codes_of_norm_inputs_or_layer_inputs(remat, mesh):
  kept = kept_bytes(*build(remat=remat, mesh=mesh), mesh)
  codes = WIDTH + 2 * WIDTH // 16
  # remat="fp8" saves the codes and statistics of two norms per layer.
  each = codes if remat == "fp8_layer" else 2 * (codes + 4)
  assert kept == TOKENS[:, 1:].size * LAYERS * each
  config = configure(remat=remat, mesh=mesh)
  tensor = config.mesh_sizes.get("tensor", 1)
  planned = saved_bytes(
    config.model, config.coat_recipe(), remat=remat, tensor=tensor
  )
  assert planned * tensor == each


@pytest.mark.parametrize("recipe", ["bf16", "fp8_linear"])
def test_fp8_remat_is_refused_for_norms_without_codes(recipe):
  with pytest.raises(ValueError, match=f"got recipe {recipe}; pass 'fp8_"):
    Decoder(
      configure().model,
      getattr(recipes, recipe)(),
      remat="fp8",
      rngs=nnx.Rngs(0),
    )


def test_gathered_weights_are_not_saved():
  mesh = meshes.make_mesh(meshes.parse_mesh("fsdp=8"))
  loss, params = build(recipe="bf16", mesh="fsdp=8")
  with jax.set_mesh(mesh):
    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
  weights = [
    x
    for x in jax.tree.leaves(residuals)
    if x.dtype == jnp.bfloat16 and x.shape[-1] == MODEL["d_ff"]
  ]
  # Only gate, up and their product are saved. Unlike weights, they have an axis
  # of 8 sequences.
  assert weights and all(8 in x.shape for x in weights)
