# SPDX-License-Identifier: Apache-2.0
"""A block of attention and output projection, whose inputs are q, k and v.

Tests of attention inside a block use it, because it returns the gradients of q,
k and v.
"""

from coat_jax.layers.back import BlockStatic, back_backward, back_forward
from coat_jax.layers.dot_product_attention import (
  AttentionInputs,
  HeadsAttention,
  inputs_specs,
)
from coat_jax.layers.linear import linear
from coat_jax.layers.product import LinearWeights, weights_specs
from coat_jax.layers.rule import rule
from coat_jax.mesh import own_heads, run_whole, spec_of, tokens
from coat_jax.ops import AttentionKind


def _fwd(x, heads, inputs, weights, static, recipe):
  out = static.middle.forward(heads, None, inputs, recipe)
  return back_forward(x, out, weights, static, recipe)


def _bwd(static, recipe, inputs, saved, g):
  (weights,) = inputs
  gradient, dweights = back_backward(
    g, None, weights, saved, static, recipe, has_bias=False
  )
  return g, gradient.h, None, dweights


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
  """Computes x + attention(q, k, v) w + bias; `AttentionKind` has options."""
  middle = HeadsAttention(AttentionKind(**options))
  heads, inputs = (q, k, v), AttentionInputs(None, segments)
  if recipe.nonlinear == "fp8":
    static = BlockStatic(middle, None, 0.0, True, None)
    weights = LinearWeights(w, bias)
    return _attention_output((x, heads, inputs, weights), static, recipe)
  out = middle.plain(heads, None, inputs, recipe)
  y = linear(out, w, bias, recipe=recipe, split="inputs")
  return run_whole(lambda x, y: x + y, x, y, out_specs=spec_of(x))
