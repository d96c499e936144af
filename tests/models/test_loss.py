# SPDX-License-Identifier: Apache-2.0
"""Compares the loss with NumPy's, computed from the decoder's hidden states."""

import jax
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from tests.comparing import jit

B, T, V = 2, 12, 48
TOKENS = np.random.default_rng(0).integers(0, V, (B, T + 1), np.int32)


def build(is_tied):
  """Returns a decoder's graph and random weights."""
  config = ModelConfig(
    family="llama",
    num_layers=1,
    d_model=32,
    d_ff=64,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=V,
    tied_embeddings=is_tied,
  )
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipes.bf16(), dtype="float32", rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(1)
  # Logits are of order 1, so that targets have different losses.
  return graph, jax.tree.map(
    lambda w: rng.normal(0, 0.3, w.shape).astype(w.dtype), params
  )


def log_softmax(logits):
  largest = logits.max(axis=-1, keepdims=True)
  return logits - largest - np.log(np.exp(logits - largest).sum(-1)[..., None])


@pytest.mark.parametrize("is_tied", [False, True])
def test_loss_is_cross_entropy_of_the_next_token(is_tied):
  graph, params = build(is_tied)
  hidden, loss = jit(
    lambda params, tokens: (
      nnx.merge(graph, params)(tokens[:, :-1]),
      loss_fn(nnx.merge(graph, params), tokens),
    )
  )(params, TOKENS)
  weights = nnx.to_pure_dict(params)
  weight = weights["embedding"].T if is_tied else weights["head"]
  logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)
  # Position t has read tokens 0 to t and predicts token t + 1.
  want = -np.mean(
    [
      log_softmax(logits)[b, t, TOKENS[b, t + 1]]
      for b in range(B)
      for t in range(T)
    ]
  )
  assert float(loss) == pytest.approx(want, rel=1e-5)
