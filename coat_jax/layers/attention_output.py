# SPDX-License-Identifier: Apache-2.0
"""Attention, and attention with its output projection and residual add.

The two share the attention's output, which the backward of both reads, so they
are under one rule. Saved: q, k, v, output and log-sum-exp; BF16, or with
recipe.attention="fp8" 1 x G FP8, and then the forward attends to the
dequantized q, k, v and projects the dequantized output. (The softmax's backward
takes its row sums from that output: an error of the output's rounding.)
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.layers.back import (
  BackWeights,
  back_backward,
  back_forward,
  back_specs,
)
from coat_jax.layers.linear import linear
from coat_jax.layers.mesh.rule import rule, run_whole
from coat_jax.layers.mesh.specs import own_heads, tokens
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.residuals import save_residual
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor, dequantize
from coat_jax.recipe import CoatRecipe


def _attention_fwd(q, k, v, causal, recipe):
  how = recipe.implementation
  q, k, v = save_residual("attention", (q, k, v))
  kept = ops.attention_fwd(q, k, v, causal=causal, implementation=how)
  kept = save_residual("attention", kept)
  # The very array that is saved, so that it is held once.
  return kept.out, (q, k, v, kept)


def _attention_bwd(causal, recipe, inputs, saved, g):
  del inputs
  how = recipe.implementation
  return ops.attention_bwd(g, *saved, causal=causal, implementation=how)


def _attention_specs(q, k, v, causal, recipe):
  del q, k, v, causal
  heads = own_heads(recipe.axes)
  return (heads,) * 3, heads


_attention = rule(_attention_fwd, _attention_bwd, _attention_specs)


def dot_product_attention(
  q: Array,
  k: Array,
  v: Array,
  *,
  causal: bool = True,
  recipe: CoatRecipe | None = None,
) -> Array:
  """softmax(q k^T / sqrt(H)) v, saving q, k, v, output and log-sum-exp.

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H], N a multiple of K.
    causal: query t sees keys up to t + S - T.
    recipe: its implementation, and its axes of a mesh; None has neither.

  Returns:
    [B, T, N, H] in q's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  return _attention((q, k, v), causal, recipe or recipes.bf16())


class HeadsSaved(NamedTuple):
  """What attention saves for the backward of a block."""

  q: Array | QTensor | None  # None where they are computed again.
  k: Array | QTensor | None
  v: Array | QTensor
  out: Array | QTensor
  lse: Array
  out_scale: Array


@dataclasses.dataclass(frozen=True)
class HeadsAttention(Middle):
  """Attention of heads (q, k, v) that are given; their gradients are plain."""

  causal: bool

  def plain(self, h, weights, inputs, recipe):
    del weights, inputs
    out = dot_product_attention(*h, causal=self.causal, recipe=recipe)
    return _merge_heads(out)

  def forward(self, h, weights, inputs, recipe):
    del weights, inputs
    keep, read = attention_storage(recipe, h[0].dtype)
    q, k, v = save_residual("attention", tuple(map(keep, h)))
    # What is kept of q may be FP8; codes wait for q itself.
    out = self.attend(read(q), read(k), v, recipe, after=h[0])
    return out._replace(saved=out.saved._replace(q=q, k=k))

  def attend(self, q, k, v, recipe, *, after) -> MiddleOutput:
    """`forward` for a caller who saves what q and k are computed from.

    Args:
      q, k: what attention reads; they are not saved.
      v: as `attention_storage` saves it.
      recipe: as of the block.
      after: see `MiddleOutput`.
    """
    keep, read = attention_storage(recipe, q.dtype)
    how = recipe.implementation
    out, lse = ops.attention_fwd(
      q, k, read(v), causal=self.causal, implementation=how
    )
    out, lse = save_residual("attention", (keep(out), lse))
    out_q = ops.quantize_tensor(
      _merge_heads(read(out)), dtype=recipe.formats.values, implementation=how
    )
    scale = save_residual("linear", out_q.scale)
    saved = HeadsSaved(None, None, v, out, lse, scale)
    return MiddleOutput(out_q, saved, after=after)

  def restore(self, saved, dtype, recipe):
    _, read = attention_storage(recipe, dtype)
    q, k = (None if x is None else read(x) for x in (saved.q, saved.k))
    v, out = read(saved.v), read(saved.out)
    operand = ops.quantize_tensor(
      _merge_heads(out),
      dtype=recipe.formats.values,
      scale=saved.out_scale,
      layout="columns",
      implementation=recipe.implementation,
    )
    return saved._replace(q=q, k=k, v=v, out=out), operand

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights, has_bias
    heads = ops.attention_bwd(
      dout.reshape(saved.out.shape),
      saved.q,
      saved.k,
      saved.v,
      ops.AttentionResiduals(saved.out, saved.lse),
      causal=self.causal,
      implementation=recipe.implementation,
    )
    return MiddleGradient(heads)


def attention_storage(recipe: CoatRecipe, dtype: DTypeLike):
  """How q, k, v and the output are saved, and read back in `dtype`."""
  if recipe.attention == "bf16":
    return (lambda x: x), (lambda x: x)
  group_size = recipe.group_size
  keep = functools.partial(
    ops.quantize_groups,
    group_size=group_size,
    dtype=recipe.formats.values,
    implementation=recipe.implementation,
  )
  read = functools.partial(dequantize, group_size=group_size, dtype=dtype)
  return keep, read


def _merge_heads(x: Array) -> Array:
  """[B, T, N, H] to [B, T, N H]."""
  b, t, n, h = x.shape
  return x.reshape(b, t, n * h)


def _attention_output_fwd(x, heads, weights, middle, recipe):
  out = middle.forward(heads, None, None, recipe)
  return back_forward(out, weights, recipe, like=x, add=x)


def _attention_output_bwd(middle, recipe, inputs, saved, g):
  (weights,) = inputs
  gradient, dweights = back_backward(
    middle, None, weights, saved, g, recipe, has_bias=False
  )
  return g, gradient.h, dweights


def _specs(x, heads, weights, middle, recipe):
  del heads, middle
  axes = recipe.axes
  arrays = tokens(axes, x), own_heads(axes), back_specs(axes, weights)
  return arrays, tokens(axes, x)


_attention_output = rule(
  _attention_output_fwd, _attention_output_bwd, _specs, reads=(2,)
)


def attention_output(
  x: Array,
  q: Array,
  k: Array,
  v: Array,
  w: Array,
  bias: Array | None = None,
  *,
  causal: bool = True,
  recipe: CoatRecipe,
  cache: Operand | None = None,
) -> Array:
  """x + attention(q, k, v) w + bias.

  Args:
    x: [B, T, D], the residual stream, BF16 (or f32).
    q: [B, T, N, H] of x's dtype.
    k, v: [B, T, K, H], N a multiple of K.
    w: [N H, D].
    bias: [D] or None.
    causal: whether a query sees only keys up to its own place.
    recipe: fused where `nonlinear` is "fp8"; `attention` says how q, k, v
      and the output are saved.
    cache: of w, from `layers.cache_weight`, or None.

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  middle, heads = HeadsAttention(causal), (q, k, v)
  if recipe.nonlinear == "fp8":
    weights = BackWeights(w, bias, cache)
    return _attention_output((x, heads, weights), middle, recipe)
  out = middle.plain(heads, None, None, recipe)
  y = linear(out, w, bias, recipe=recipe, cache=cache, split="inputs")
  return run_whole(jnp.add, recipe.axes, x, y)
