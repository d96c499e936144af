# SPDX-License-Identifier: Apache-2.0
"""Attention, and attention with its output projection and residual add.

The two share the attention's output, which the backward of both reads, so they
are one custom_vjp. Remembered: q, k, v, output and log-sum-exp; BF16, or with
recipe.attention="fp8" 1 x G FP8, and then the forward attends to the
dequantized q, k, v and projects the dequantized output. (The softmax's backward
takes its row sums from that output: an error of the output's rounding.)
"""

import functools
from typing import NamedTuple

from jax import Array, P

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E5M2
from coat_jax.layers.linear import add_linear, bias_gradient, keep_scale, linear
from coat_jax.layers.mesh.collectives import gather_sequence
from coat_jax.layers.mesh.rule import block
from coat_jax.layers.mesh.specs import cached, own_heads, split_inputs, tokens
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.weight import quantized_weight, weight_gradient
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor, dequantize
from coat_jax.recipe import CoatRecipe


def _attention_fwd(q, k, v, causal, recipe):
  how = recipe.implementation
  q, k, v = save_residual("attention", (q, k, v))
  kept = ops.attention_fwd(q, k, v, causal=causal, implementation=how)
  kept = save_residual("attention", kept)
  # The very array that is remembered, so that it is held once.
  return kept.out, (q, k, v, kept)


def _attention_bwd(causal, recipe, kept, g):
  how = recipe.implementation
  return ops.attention_bwd(g, *kept, causal=causal, implementation=how)


def _attention_specs(axes, q, k, v):
  del k, v
  heads = own_heads(axes)
  return (heads,) * 3, heads


_attention = block(_attention_fwd, _attention_bwd, _attention_specs)


def dot_product_attention(
  q: Array,
  k: Array,
  v: Array,
  *,
  causal: bool = True,
  recipe: CoatRecipe | None = None,
) -> Array:
  """softmax(q k^T / sqrt(H)) v, remembering q, k, v, out and log-sum-exp.

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


class OutputResiduals(NamedTuple):
  """What `attention_output_fwd` hands to its backward."""

  q: Array | QTensor
  k: Array | QTensor
  v: Array | QTensor
  out: Array | QTensor
  lse: Array
  out_scale: Array
  w: Array
  cache: Operand
  bias: Array | None


def attention_output_fwd(x, q, k, v, w, bias, cache, causal, recipe):
  """x + attention(q, k, v) w + bias, and what is handed over."""
  keep, read = _storage(recipe, q.dtype)
  how = recipe.implementation
  projected = q  # What is kept of it may be FP8.
  q, k, v = save_residual("attention", (keep(q), keep(k), keep(v)))
  out, lse = ops.attention_fwd(
    read(q), read(k), read(v), causal=causal, implementation=how
  )
  out, lse = save_residual("attention", (keep(out), lse))
  out_q = ops.quantize_tensor(_merge_heads(read(out)), implementation=how)
  w_q = quantized_weight(w, cache, "columns", recipe, after=projected)
  total = add_linear(x, out_q, w_q, bias, recipe)
  cache = keep_scale(cache, w_q)
  scale = save_residual("linear", out_q.scale)
  return total, OutputResiduals(q, k, v, out, lse, scale, w, cache, bias)


def attention_output_bwd(causal, recipe, residuals, g):
  r, how = residuals, recipe.implementation
  _, read = _storage(recipe, g.dtype)
  q, k, v, out = read(r.q), read(r.k), read(r.v), read(r.out)
  g_q = ops.quantize_tensor(g, dtype=E5M2, layout="both", implementation=how)
  g_q = gather_sequence(g_q, recipe, batch=g.shape[0])
  out_q = ops.quantize_tensor(
    _merge_heads(out), scale=r.out_scale, layout="columns", implementation=how
  )
  dw = weight_gradient(out_q, g_q, r.w, recipe)
  w_q = quantized_weight(r.w, r.cache, "rows", recipe)
  dout = ops.linear_dgrad(g_q, w_q, dtype=g.dtype, implementation=how)
  dq, dk, dv = ops.attention_bwd(
    dout.reshape(out.shape),
    q,
    k,
    v,
    ops.AttentionResiduals(out, r.lse),
    causal=causal,
    implementation=how,
  )
  dbias = bias_gradient(g, r.bias, recipe, has_columns=False)
  return g, dq, dk, dv, dw, dbias, None


def _specs(axes, x, q, k, v, w, bias, cache):
  del k, v, w, bias
  heads, rows = own_heads(axes), split_inputs(axes)
  arrays = (
    tokens(axes, x),
    heads,
    heads,
    heads,
    rows,
    P(),
    cached(cache, rows),
  )
  return arrays, tokens(axes, x)


_attention_output = block(attention_output_fwd, attention_output_bwd, _specs)


def _storage(recipe, dtype):
  """How q, k, v and the output are kept, and read back in `dtype`."""
  if recipe.attention == "bf16":
    return (lambda x: x), (lambda x: x)
  group_size = recipe.group_size
  keep = functools.partial(
    ops.quantize_groups,
    group_size=group_size,
    implementation=recipe.implementation,
  )
  read = functools.partial(dequantize, group_size=group_size, dtype=dtype)
  return keep, read


def _merge_heads(x: Array) -> Array:
  """[B, T, N, H] to [B, T, N H]."""
  return x.reshape(*x.shape[:2], -1)


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
    recipe: fused where `nonlinear` is "fp8"; `attention` says what is kept how.
    cache: of w, from `layers.weight`, or None.

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  if recipe.nonlinear == "fp8":
    return _attention_output((x, q, k, v, w, bias, cache), causal, recipe)
  out = dot_product_attention(q, k, v, causal=causal, recipe=recipe)
  return x + linear(
    _merge_heads(out), w, bias, recipe=recipe, cache=cache, split="inputs"
  )
