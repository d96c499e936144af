# SPDX-License-Identifier: Apache-2.0
"""Compares generation after images with transformers and an uncached model."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import VisionLanguageModel, generate, load_hf
from coat_jax.models.cache import cached_forward, empty_cache
from coat_jax.models.hf.config import read_config
from coat_jax.models.prompts import place_images
from tests.comparing import assert_close, jit
from tests.models.hf.folders import DATA, expected

GOLDEN = expected("llava")
TOKENS, IMAGES = GOLDEN["input_ids"].astype(np.int32), GOLDEN["pixel_values"]
IMAGE = 383


@pytest.fixture(scope="module")
def model():
  # Generation uses no FP8, whatever the model's recipe.
  return load_hf(
    DATA / "llava",
    recipe=recipes.coat(),
    dtype=jnp.float32,
  )


@pytest.mark.slow
def test_cached_logits_after_images_match_transformers(model):
  rows = [TOKENS[0], TOKENS[1, :17]]
  padding = np.int32([24 - len(row) for row in rows])
  tokens = np.full((2, 24), -1, np.int32)
  for row, skip, each in zip(tokens, padding, rows, strict=True):
    row[skip:] = each
  placed = place_images(model, tokens, IMAGES[:, None])
  graph, params = nnx.split(model.decoder)

  @jit
  def run(params, tokens, cache, placed):
    decoder = nnx.merge(graph, params)
    first, cache = cached_forward(
      decoder,
      tokens[:, :20],
      cache,
      placed=placed._replace(rows=placed.rows[:, :20]),
    )
    then, _ = cached_forward(decoder, tokens[:, 20:], cache)
    return decoder.logits_of_hidden(jnp.concatenate([first, then], axis=1))

  cache = empty_cache(model.decoder, jnp.asarray(padding), size=24)
  logits = run(params, jnp.asarray(tokens), cache, placed)
  want = GOLDEN["logits"]
  # Only the summation order of f32 dot products differs: they have 64 to 588
  # terms, in four layers.
  assert_close(logits[0], want[0], 1e-5)
  assert_close(logits[1, padding[1] :], want[1, :17], 1e-5)


@pytest.mark.slow
def test_tokens_after_images_match_the_model_without_a_cache(model):
  text = [token for token in TOKENS[0].tolist() if token != IMAGE]
  both = [*TOKENS[0].tolist(), *TOKENS[1, :12].tolist()]
  prompts = [TOKENS[1, :9].tolist(), both, text]
  images = np.zeros((3, 2, *IMAGES.shape[1:]), np.float32)
  images[0, 0], images[1] = IMAGES[1], IMAGES
  found = generate(model, prompts, max_new_tokens=5, pixel_values=images)
  plain = load_hf(
    DATA / "llava",
    recipe=recipes.bf16(),
    dtype=jnp.float32,
  )
  graph, params = nnx.split(plain)

  @jit
  def run(params, tokens, images):
    return nnx.merge(graph, params).logits(tokens, images)

  margins = []
  for prompt, pixels, new in zip(prompts, images, found.tokens, strict=True):
    row = list(prompt)
    for _ in range(5):
      padded = np.pad(np.int32(row), (0, 48 - len(row)))[None]
      logits = np.asarray(run(params, jnp.asarray(padded), pixels[None]))
      logits = logits[0, len(row) - 1]
      margins.append(np.diff(np.sort(logits)[-2:]) / np.abs(logits).max())
      row.append(int(np.argmax(logits)))
    assert new == row[len(prompt) :]
  # A different summation order changes logits by less than the gap between the
  # two largest, so it cannot change the choice.
  assert min(margins) > 1e-5
  # Check that images have an effect.
  other = generate(model, prompts, max_new_tokens=5, pixel_values=-9 * images)
  assert other.tokens[1] != found.tokens[1]
  # A batch of prompts without images needs no pixel values.
  alone = generate(model, [text], max_new_tokens=5)
  assert alone.tokens == found.tokens[2:]


def test_images_that_do_not_match_the_prompts_are_refused():
  config, _ = read_config(DATA / "llava")
  model = nnx.eval_shape(
    lambda: VisionLanguageModel(config, recipes.coat(), rngs=nnx.Rngs(0))
  )
  prompt, images = TOKENS[0].tolist(), IMAGES[:1, None]
  for given, pixels, message in (
    (prompt, images[0], r"one row per prompt, got \(1, 3, 28, 28\) for 1 p"),
    (
      prompt,
      IMAGES[:, None],
      r"got \(2, 1, 3, 28, 28\) for 1 prompts; if",
    ),
    (prompt[:4], images, "must have 4 image tokens .* got 2 in prompt 0"),
    (prompt * 2, images, "at most 1 images, got 8 in prompt 0; repeat"),
  ):
    with pytest.raises(ValueError, match=f"generate: .*{message}"):
      generate(model, [given], max_new_tokens=1, pixel_values=pixels)
  with pytest.raises(ValueError, match="with a Decoder; leave pixel_values"):
    generate(model.decoder, [prompt], max_new_tokens=1, pixel_values=images)
