# SPDX-License-Identifier: Apache-2.0
"""Tests vision-language models: logits, placement of features, gradients."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import (
  Batch,
  Decoder,
  ModelConfig,
  VisionConfig,
  VisionLanguageConfig,
  VisionLanguageModel,
  load_hf,
  loss_fn,
)
from coat_jax.models.params import mesh_axes, param_shardings
from coat_jax.models.placing import Placed, place_features, token_rows
from tests.comparing import assert_close, jit
from tests.models.hf.folders import DATA, expected
from train.mesh import make_mesh, parse_mesh

LLAVA = DATA / "llava"
CONFIG = VisionLanguageConfig(
  text=ModelConfig(
    family="llama",
    num_layers=2,
    d_model=64,
    d_ff=176,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=208,
  ),
  vision=VisionConfig(
    family="siglip_vision",
    num_layers=2,
    d_model=48,
    d_ff=144,
    num_heads=4,
    image_size=16,
    patch_size=8,
    has_pool=False,
  ),
  image_token=207,
  feature_layer=-1,
  feature_select="full",
)


def loaded(**options):
  options = dict(recipe=recipes.bf16(), dtype=jnp.float32) | options
  return load_hf(LLAVA, **options)


@pytest.mark.slow
def test_logits_match_transformers_however_rows_are_packed():
  golden = expected("llava")
  tokens, images = golden["input_ids"], golden["pixel_values"]
  # The third row is text. The fourth packs the beginnings of the first two rows
  # and contains both images.
  text = np.where(tokens[0] == 383, 5, tokens[0])
  packed = np.concatenate([tokens[0, :12], tokens[1, :12]])
  rows = jnp.asarray(np.stack([*tokens, text, packed]), jnp.int32)
  segments = np.ones(rows.shape, np.int32)
  segments[3, 12:] = 2
  # No token refers to this image, so it must have no effect.
  noise = np.random.default_rng(0).normal(size=images.shape).astype(np.float32)
  slots = np.stack([images, noise], axis=1)
  slots = np.concatenate([slots, noise[None], images[None]])
  graph, state = nnx.split(loaded())

  @jit
  def run(state, rows, slots, segments):
    model = nnx.merge(graph, state)
    alone = model.decoder.logits(rows[2:3])
    return model.logits(rows, slots, segments), alone, model.logits(rows[2:3])

  logits, *alone = run(state, rows, jnp.asarray(slots), jnp.asarray(segments))
  want = golden["logits"]
  # Only the summation order of f32 dot products differs: they have 64 to 588
  # terms, in four layers.
  assert_close(logits[:2], want, 1e-5)
  assert_close(logits[3], np.concatenate([want[0, :12], want[1, :12]]), 1e-5)
  assert_close(logits[2:3], alone[0], 1e-5)
  np.testing.assert_array_equal(*alone)


@pytest.mark.parametrize("sizes", [None, "fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_features_replace_image_tokens_in_order(sizes):
  tokens = jnp.asarray([[9, 1, 9, 9], [1, 2, 9, 1], [9, 9, 9, 9]] * 8)
  rows = token_rows(tokens, 9, 3)
  want = [[0, -1, 1, 2], [-1, -1, 0, -1], [0, 1, 2, -1]] * 8
  np.testing.assert_array_equal(rows, want)
  rng = np.random.default_rng(0)
  x, features, g = (
    jnp.asarray(rng.normal(size=(24, n, 8)), jnp.float32) for n in (4, 3, 4)
  )
  mesh = sizes and make_mesh(parse_mesh(sizes))
  axes = mesh and mesh_axes(mesh.shape)

  @jax.jit
  def run(x, features, g):
    def place(x, features):
      return place_features(x, Placed(features, rows), axes=axes)

    placed, pull = jax.vjp(place, x, features)
    return placed, pull(g)

  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    placed, (dx, dfeatures) = run(x, features, g)
  # Compare with a matmul by a matrix of ones and zeros.
  is_taken = np.asarray(want)[..., None] == np.arange(3)
  own = ~is_taken.any(-1, keepdims=True)
  product = np.einsum("btm,bmd->btd", is_taken, features)
  np.testing.assert_array_equal(placed, product + own * np.asarray(x))
  np.testing.assert_array_equal(dx, own * np.asarray(g))
  np.testing.assert_array_equal(
    dfeatures, np.einsum("btm,btd->bmd", is_taken, g)
  )


def test_images_of_wrong_shape_or_for_a_text_model_are_refused():
  make = lambda: VisionLanguageModel(  # noqa: E731
    CONFIG, recipes.bf16(), rngs=nnx.Rngs(0)
  )
  model = nnx.eval_shape(make)
  with pytest.raises(
    ValueError, match=r"must be \[B, I, C, H, W\].*add the missing ax"
  ):
    model.features(jnp.zeros((2, 3, 16, 16)))
  tokens, images = jnp.zeros((1, 5), jnp.int32), jnp.zeros((2, 1, 3, 16, 16))
  with pytest.raises(ValueError, match="sequences, got 2 and 1; pass"):
    model(tokens, images)
  decoder = nnx.eval_shape(
    lambda: Decoder(CONFIG.text, recipes.bf16(), rngs=nnx.Rngs(0))
  )
  with pytest.raises(ValueError, match="images need a VisionLanguageModel"):
    loss_fn(decoder, jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 1, 3, 16, 16)))


def a_batch(sequences=8):
  """Returns a batch of sequences with two, one or no images, and the images."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 207, (sequences, 17)).astype(np.int32)
  tokens[0::4, :4] = tokens[0::4, 6:10] = tokens[1::4, 3:7] = 207
  is_target = np.zeros(tokens.shape, bool)
  is_target[:, 11:] = True
  images = rng.normal(size=(sequences, 2, 3, 16, 16)).astype(np.float32)
  batch = Batch.make(tokens, np.ones(tokens.shape, np.int32), is_target)
  return batch, jnp.asarray(images)


@pytest.mark.slow
def test_loss_and_projector_gradients_on_a_mesh_match_one_device():
  batch, images = a_batch()

  def run(mesh):
    axes = mesh and mesh_axes(mesh.shape)
    recipe = dataclasses.replace(recipes.bf16(), axes=axes)
    model = VisionLanguageModel(
      CONFIG, recipe, dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    if mesh is not None:
      params = jax.device_put(params, param_shardings(mesh, params))

    def loss(projector, params, *batch):
      params = params | {"projector": projector}
      return loss_fn(nnx.merge(graph, params), *batch)

    step = jit(jax.value_and_grad(loss))
    return jax.device_get(step(params["projector"], params, batch, images))

  want = run(None)
  assert np.abs(want[1]["linear_1"]["kernel"]).max() > 0
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  with jax.set_mesh(mesh):
    # Devices accumulate f32 sums in a different order.
    assert_close(run(mesh), want, 1e-5)
