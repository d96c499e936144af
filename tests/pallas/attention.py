# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention and gradients by autodiff, for tests of its kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax import ops
from tests.ops.naive_attention import naive_attention

B, T, H = 2, 96, 64


def arrays(heads, kv_heads, t=T, size=H, dtype=jnp.bfloat16):
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=(B, t, n, size)), dtype)
    for n in (heads, kv_heads, kv_heads, heads)
  ]


def segments_of(order, t=T):
  """Returns ids of packed documents, or ids in any order."""
  if order == "sorted":
    ends = np.array([[7, 40, 64], [31, 33, 95]]) * t // T
    return np.array([np.searchsorted(x, np.arange(t), "right") for x in ends])
  return np.random.default_rng(1).integers(-2, 3, (B, t))


def run(q, k, v, dout, kind, segments, how):
  forward, backward = how(ops.attention_fwd), how(ops.attention_bwd)
  residuals = forward(q, k, v, segments, kind=kind)
  return residuals, backward(dout, q, k, v, residuals, segments, kind=kind)


@functools.cache
def named(implementation):
  return lambda op: functools.partial(op, implementation=implementation)


def oracle(q, k, v, dout, kind, mask):
  """Computes gradients in f32 by autodiff through all scores."""
  scale = kind.scale or q.shape[-1] ** -0.5
  f = functools.partial(
    naive_attention, mask=mask, scale=scale, cap=kind.soft_cap
  )
  (_, lse), vjp = jax.vjp(f, *(x.astype(jnp.float32) for x in (q, k, v)))
  return vjp((dout.astype(jnp.float32), jnp.zeros_like(lse)))
