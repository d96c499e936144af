# SPDX-License-Identifier: Apache-2.0
"""Textbook attention, which computes masks and scores as whole matrices."""

import jax
import jax.numpy as jnp
import numpy as np


def seen(t, s, kind, segments=None):
  """Returns which keys each query sees: bool [B or 1, T, S]."""
  mask = np.ones((1 if segments is None else len(segments), t, s), bool)
  for b, i, j in np.ndindex(mask.shape):
    query = i + s - t
    if kind.causal and j > query:
      mask[b, i, j] = False
    # The window size includes the query's own position, like `sliding_window`
    # in transformers.
    if kind.window is not None and not query - kind.window < j:
      mask[b, i, j] = False
    if segments is not None and segments[b, i] != segments[b, j]:
      mask[b, i, j] = False
  return mask


def naive_attention(q, k, v, *, mask, scale, cap):
  """Computes output and log-sum-exp in q's dtype; JAX can differentiate it."""
  repeats = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
  scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  scores = jnp.where(mask[:, None], scores, -jnp.inf)
  p = jax.nn.softmax(scores, axis=-1)
  lse = jax.nn.logsumexp(scores, axis=-1)
  return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.moveaxis(lse, 1, 2)


def exact_attention(q, k, v, kind, segments=None):
  """Computes output and log-sum-exp in NumPy's float64."""
  mask = seen(q.shape[1], k.shape[1], kind, segments)
  repeats = q.shape[2] // k.shape[2]
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  k, v = (np.repeat(x, repeats, axis=2) for x in (k, v))
  scores = np.einsum("btnh,bsnh->bnts", q, k)
  scores *= q.shape[-1] ** -0.5 if kind.scale is None else kind.scale
  if kind.soft_cap is not None:
    scores = kind.soft_cap * np.tanh(scores / kind.soft_cap)
  scores = np.where(mask[:, None], scores, -np.inf)
  largest = np.max(scores, axis=-1, keepdims=True)
  p = np.exp(scores - largest)
  total = np.sum(p, axis=-1, keepdims=True)
  lse = np.moveaxis((largest + np.log(total))[..., 0], 1, 2)
  return np.einsum("bnts,bsnh->btnh", p / total, v), lse
