# SPDX-License-Identifier: Apache-2.0
"""A block that computes attention of q, k and v, and the output projection.

Tests of attention inside a block use it, because it returns the gradients of q,
k and v.
"""

import jax.numpy as jnp

from coat_jax import ops
from coat_jax.layers.block import BlockStatic, back_backward, back_forward
from coat_jax.layers.dot_product_attention import (
  AttentionInputs,
  dot_product_attention,
  inputs_specs,
)
from coat_jax.layers.linear import linear
from coat_jax.layers.product import LinearWeights, weights_specs
from coat_jax.layers.rope import Heads
from coat_jax.layers.rule import rule
from coat_jax.layers.self_attention import SelfAttention
from coat_jax.mesh import own_heads, run_whole, spec_of, tokens
from coat_jax.ops import AttentionKind

# Too large to clip anything; with a limit, gradients are returned unrounded.
LIMIT = 1e30


def heads_middle(num_heads, num_kv_heads, kind):
  """Builds attention without RoPE that returns unrounded gradients."""
  return SelfAttention(Heads(num_heads, num_kv_heads, None), kind, LIMIT)


def forward(middle, heads, inputs, recipe):
  """Computes the middle's result for q, k and v."""
  h = ops.join_heads(*heads, None, None)
  return middle.forward(h, None, inputs, recipe)


def split(middle, gradient, recipe):
  """Splits the middle's gradient into dq, dk and dv."""
  n, k, _ = middle.heads.of_device(recipe.axes)
  return ops.split_heads(
    gradient.values, None, None, num_heads=n, num_kv_heads=k
  )


def _fwd(x, heads, inputs, weights, static, recipe):
  out = forward(static.middle, heads, inputs, recipe)
  return back_forward(x, out, weights, static, recipe)


def _bwd(static, recipe, inputs, saved, g):
  (weights,) = inputs
  gradient, dweights = back_backward(
    g, None, weights, saved, static, recipe, has_bias=False
  )
  return g, split(static.middle, gradient, recipe), None, dweights


def _specs(x, heads, inputs, weights, static, recipe):
  del heads, static
  axes, stream = recipe.axes, tokens(recipe.axes, x)
  of_weights = weights_specs(axes, weights, "inputs")
  return (stream, own_heads(axes), inputs_specs(axes, inputs), of_weights), (
    stream
  )


_attention_output = rule(_fwd, _bwd, _specs, reads=(3,))


def attention_output(
  x, q, k, v, w, bias=None, *, segments=None, recipe, **options
):
  """Computes x + attention(q, k, v) @ w + bias; options: `AttentionKind`."""
  if recipe.nonlinear == "fp8":
    middle = heads_middle(q.shape[2], k.shape[2], AttentionKind(**options))
    static = BlockStatic(middle, None, 0.0, True, None)
    inputs = AttentionInputs(jnp.arange(q.shape[1]), segments)
    arrays = x, (q, k, v), inputs, LinearWeights(w, bias)
    return _attention_output(arrays, static, recipe)
  out = dot_product_attention(
    q, k, v, segments=segments, recipe=recipe, **options
  )
  out = out.reshape(*x.shape[:2], -1)
  y = linear(out, w, bias, recipe=recipe, split="inputs")
  return run_whole(lambda x, y: x + y, x, y, out_specs=spec_of(x))
