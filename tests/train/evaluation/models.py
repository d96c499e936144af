# SPDX-License-Identifier: Apache-2.0
"""Small byte-level models, and scores computed one row at a time."""

import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax import recipes
from coat_jax.models import ModelConfig
from tests.models.test_cache import SMALL, build, without_cache

_SHAPE: Any = SMALL | dict(vocab_size=256)
CONFIG = ModelConfig(family="llama", **_SHAPE)


def random_model():
  """Makes a model in which every token depends on all before it."""
  return build(CONFIG, recipes.bf16())


def alphabet_model():
  """Makes a model that predicts the next letter, and a line end after z.

  Other bytes predict themselves. Layers add nothing, so only the last token
  matters.
  """
  model = random_model()
  graph, params, others = nnx.split(model, nnx.Param, ...)
  params = nnx.to_pure_dict(params)
  params["layers"] = jax.tree.map(jnp.zeros_like, params["layers"])
  following = list(range(256))
  letters = string.ascii_lowercase + "\n"
  for here, there in zip(letters, letters[1:] + letters[0], strict=True):
    following[ord(here)] = ord(there)
  rng = np.random.default_rng(0)
  rows = rng.normal(size=params["embedding"].shape)
  head = np.zeros((rows.shape[1], 256))
  head[:, following] = 8 * (rows / np.linalg.norm(rows, axis=1)[:, None]).T
  params["embedding"] = jnp.asarray(rows, jnp.float32)
  params["head"] = jnp.asarray(head, jnp.float32)
  params["norm"] = jax.tree.map(jnp.ones_like, params["norm"])
  return nnx.merge(graph, params, others)


def oracle(model):
  """Returns a function (context, continuation, length) -> logprobs, is_greedy.

  The function computes f32 logits of one row at a time, without padding.
  """
  run = without_cache(model)

  def score(context, continuation, length):
    row = np.array([*context, *continuation], np.int32)[-(length + 1) :]
    logits = np.asarray(run(row[:-1]), np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    logits -= largest + np.log(
      np.exp(logits - largest).sum(axis=-1, keepdims=True)
    )
    count = len(continuation)
    last, wanted = logits[-count:], row[-count:]
    is_greedy = bool((last.argmax(axis=-1) == wanted).all())
    return last[np.arange(count), wanted], is_greedy

  return score
