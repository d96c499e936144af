# SPDX-License-Identifier: Apache-2.0
"""Attention, and attention with its output projection and residual add.

The backward of both reads the attention's output, so they share one rule.
Saved: q, k, v, output and log-sum-exp; in BF16, or with recipe.attention="fp8"
in 1 x G FP8, and then the forward attends to the dequantized q, k, v and
projects the dequantized output. (The softmax's backward computes its row sums
from that output: their error is that of rounding the output.)
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.back import (
  BackWeights,
  back_backward,
  back_forward,
  back_specs,
)
from coat_jax.layers.heads_inputs import (
  HeadsInputs,
  Kinds,
  heads_inputs_specs,
  of_kind,
)
from coat_jax.layers.linear import linear
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import check_float, check_recipe
from coat_jax.layers.operands import in_groups, quantized, scale_of
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rule import rule
from coat_jax.mesh import own_heads, run_whole, spec_of, tokens
from coat_jax.numerics import recipes
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import AttentionKind, AttentionResiduals, Operand


def _attend(q, k, v, inputs, kinds, recipe):
  run = functools.partial(
    ops.attention_fwd, implementation=recipe.implementation
  )
  return of_kind(run, kinds, inputs.kind)(q, k, v, inputs.segments)


def _attend_backward(g, q, k, v, out, lse, inputs, kinds, recipe):
  run = functools.partial(
    ops.attention_bwd, implementation=recipe.implementation
  )
  residuals = AttentionResiduals(out, lse)
  run = of_kind(run, kinds, inputs.kind)
  return run(g, q, k, v, residuals, inputs.segments)


def _attention_fwd(q, k, v, inputs, kinds, recipe):
  q, k, v = save_residual("attention", (q, k, v))
  kept = _attend(q, k, v, inputs, kinds, recipe)
  kept = save_residual("attention", kept)
  # Exactly the array that is saved, so that memory holds it once.
  return kept.out, (q, k, v, kept)


def _attention_bwd(kinds, recipe, inputs, saved, g):
  (inputs,), (q, k, v, kept) = inputs, saved
  return (
    *_attend_backward(g, q, k, v, kept.out, kept.lse, inputs, kinds, recipe),
    None,
  )


def _attention_specs(q, k, v, inputs, kinds, recipe):
  del q, k, v, inputs, kinds
  heads = own_heads(recipe.axes)
  return (heads, heads, heads, heads_inputs_specs(recipe.axes)), heads


_attention = rule(_attention_fwd, _attention_bwd, _attention_specs, reads=(3,))


def dot_product_attention(
  q: Array,
  k: Array,
  v: Array,
  *,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  segments: Array | None = None,
  recipe: CoatRecipe | None = None,
) -> Array:
  """softmax(q k^T / sqrt(H)) v, saving q, k, v, output and log-sum-exp.

  Example usage, with packed documents of three and five tokens, where a query
  sees three keys::

    >>> from coat_jax.layers import dot_product_attention
    >>> import jax.numpy as jnp

    >>> q, kv = jnp.ones((1, 8, 4, 16)), jnp.ones((1, 8, 2, 16))
    >>> documents = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    >>> dot_product_attention(
    ...   q, kv, kv, window=3, soft_cap=50.0, segments=documents
    ... ).shape
    (1, 8, 4, 16)

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H], N a multiple of K.
    causal: query t sees keys up to t + S - T.
    window: a query sees only the last `window` of these, including its own,
      like `sliding_window` in Hugging Face Transformers; None for all.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them
      unchanged.
    scale: factor of q k^T; None for 1 / sqrt(H).
    segments: int32 [B, T], which requires S = T; ids such as those of packed
      documents or padding: a query sees keys of its own segment; None for one
      segment.
    recipe: provides the implementation and the mesh axes; None for one device.

  Returns:
    [B, T, N, H] in q's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes are inconsistent; a window is below 1 or attention with a
      window is not causal; a cap or a scale is not above 0.
  """
  op = "dot_product_attention"
  recipe = recipes.bf16() if recipe is None else recipe
  _check(op, recipe, q=q, k=k, v=v)
  kind = AttentionKind(causal, window, soft_cap, scale)
  inputs = HeadsInputs(segments)
  return _attention((q, k, v, inputs), kind, recipe)


def _check(op: str, recipe: Any, **heads: Any) -> None:
  """Raises if `recipe` is not a CoatRecipe or q, k, v are not heads."""
  check_recipe(op, recipe)
  for name, x in heads.items():
    check_float(op, name, x, ndim=4)


class HeadsSaved(NamedTuple):
  """Arrays that attention saves for the backward of a block."""

  q: Array | QTensor | None  # None if they are recomputed.
  k: Array | QTensor | None
  v: Array | QTensor
  out: Array | QTensor
  lse: Array
  out_scale: Array | None  # See `scale_of`.
  inputs: HeadsInputs


@dataclasses.dataclass(frozen=True)
class HeadsAttention(Middle):
  """Attention of given heads (q, k, v); their gradients stay unquantized.

  `inputs` are `HeadsInputs`. `kind` says which keys a query sees and how scores
  are scaled; it is a tuple if a stack has several kinds of layers.
  """

  kind: Kinds

  def plain(self, h, weights, inputs, recipe):
    del weights
    return _merge_heads(_attention((*h, inputs), self.kind, recipe))

  def forward(self, h, weights, inputs, recipe):
    del weights
    keep, read = attention_storage(recipe, h[0].dtype)
    q, k, v = save_residual("attention", tuple(map(keep, h)))
    # The saved q may be FP8; codes wait for q itself.
    out = self.attend(read(q), read(k), v, inputs, recipe, after=h[0])
    return out._replace(saved=out.saved._replace(q=q, k=k))

  def attend(self, q, k, v, inputs, recipe, *, after) -> MiddleOutput:
    """Runs `forward` for a caller who saves what q and k are computed from.

    Attention reads or quantizes q and k but does not save them; v is as
    `attention_storage` saves it. For `after` see `MiddleOutput`.
    """
    keep, read = attention_storage(recipe, after.dtype)
    inputs = save_residual("attention", inputs)
    out, lse = _attend(q, k, read(v), inputs, self.kind, recipe)
    out, lse = save_residual("attention", (keep(out), lse))
    out_q = quantized(_merge_heads(read(out)), recipe)
    saved = HeadsSaved(None, None, v, out, lse, scale_of(out_q), inputs)
    return MiddleOutput(out_q, saved, after=after)

  def restore(self, saved, dtype, recipe):
    _, read = attention_storage(recipe, dtype)
    q, k = (None if x is None else read(x) for x in (saved.q, saved.k))
    v, out = read(saved.v), read(saved.out)
    operand = quantized(
      _merge_heads(out), recipe, scale=saved.out_scale, layout="columns"
    )
    return saved._replace(q=q, k=k, v=v, out=out), operand

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    del weights, has_bias
    heads = _attend_backward(
      dout.reshape(*saved.lse.shape, dout.shape[-1] // saved.lse.shape[-1]),
      saved.q,
      saved.k,
      saved.v,
      saved.out,
      saved.lse,
      saved.inputs,
      self.kind,
      recipe,
    )
    return MiddleGradient(heads)

  def specs(self, axes, weights, inputs):
    del weights, inputs
    return P(), heads_inputs_specs(axes)


def attention_storage(recipe: CoatRecipe, dtype: DTypeLike):
  """Returns how q, k, v and the output are saved, and read back in `dtype`."""
  if recipe.attention == "bf16":
    return (lambda x: x), (lambda x: x)
  keep = functools.partial(in_groups, recipe=recipe)
  return keep, (lambda x: x.dequantize(dtype))


def _merge_heads(x: Array) -> Array:
  """Reshapes [B, T, N, H] to [B, T, N H]."""
  b, t, n, h = x.shape
  return x.reshape(b, t, n * h)


def _attention_output_fwd(x, heads, inputs, weights, middle, recipe):
  out = middle.forward(heads, None, inputs, recipe)
  return back_forward(out, weights, recipe, like=x, add=x)


def _attention_output_bwd(middle, recipe, inputs, saved, g):
  (weights,) = inputs
  gradient, dweights = back_backward(
    middle, None, weights, saved, g, recipe, has_bias=False
  )
  return g, gradient.h, None, dweights


def _specs(x, heads, inputs, weights, middle, recipe):
  del heads
  axes, stream = recipe.axes, tokens(recipe.axes, x)
  _, of_inputs = middle.specs(axes, None, inputs)
  arrays = stream, own_heads(axes), of_inputs, back_specs(axes, weights)
  return arrays, stream


_attention_output = rule(
  _attention_output_fwd, _attention_output_bwd, _specs, reads=(3,)
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
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  segments: Array | None = None,
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
    causal: whether a query sees only keys up to its own position.
    window, soft_cap, scale, segments: see `dot_product_attention`.
    recipe: fused if `nonlinear` is "fp8"; `attention` selects how q, k, v
      and the output are saved.
    cache: cache of w, from `layers.cache_weight`, or None.

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    TypeError, ValueError: see `dot_product_attention`; or w has another shape.
  """
  op = "attention_output"
  _check(op, recipe, q=q, k=k, v=v)
  check_float(op, "x", x, ndim=3)
  want = q.shape[2] * q.shape[3], x.shape[-1]
  # On a mesh, a caller's own shard_map has other shards of it.
  if not recipe.axes and w.shape != want:
    raise ValueError(
      f"{op}: w must be [N H, D], {want}, got {w.shape}; pass the output "
      "projection of these heads"
    )
  kind = AttentionKind(causal, window, soft_cap, scale)
  middle, heads, inputs = HeadsAttention(kind), (q, k, v), HeadsInputs(segments)
  if recipe.nonlinear == "fp8":
    weights = BackWeights(w, bias, cache)
    return _attention_output((x, heads, inputs, weights), middle, recipe)
  out = middle.plain(heads, None, inputs, recipe)
  y = linear(out, w, bias, recipe=recipe, cache=cache, split="inputs")
  return run_whole(jnp.add, x, y, out_specs=spec_of(x))
