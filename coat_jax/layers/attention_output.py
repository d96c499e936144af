# SPDX-License-Identifier: Apache-2.0
"""Attention, and attention with its output projection and residual add.

The two share the attention's output, which the backward of both reads, so they
are under one rule. Saved: q, k, v, output and log-sum-exp; BF16, or with
recipe.attention="fp8" 1 x G FP8, and then the forward attends to the
dequantized q, k, v and projects the dequantized output. (The softmax's backward
takes its row sums from that output: an error of the output's rounding.)

With recipe.attention_compute="fp8" the products of attention read FP8, with one
scale per tensor. What is saved then are their operands: the very codes that the
forward multiplied are those of the backward and, of the output, those of the
projection.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.layers.back import (
  BackWeights,
  back_backward,
  back_forward,
  back_specs,
)
from coat_jax.layers.fp8_attention import fp8_attention_backward, per_tensor
from coat_jax.layers.heads_inputs import (
  HeadsInputs,
  Kinds,
  heads_inputs_specs,
  of_kind,
)
from coat_jax.layers.linear import linear
from coat_jax.layers.mesh.rule import rule, run_whole
from coat_jax.layers.mesh.specs import own_heads, tokens
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import check_float, check_recipe
from coat_jax.layers.operands import quantized, scale_of
from coat_jax.layers.residuals import save_residual
from coat_jax.ops import (
  AttentionKind,
  AttentionResiduals,
  FP8AttentionResiduals,
  Operand,
)
from coat_jax.qtensor import QTensor, dequantize
from coat_jax.recipe import CoatRecipe


def _attend(q, k, v, inputs, kinds, recipe):
  q, k, v = _read_by_products((q, k, v), recipe)
  run: Any = ops.attention_fwd
  if recipe.attention_compute == "fp8":
    run = ops.attention_fp8_fwd
  run = functools.partial(run, implementation=recipe.implementation)
  return of_kind(run, kinds, inputs.kind)(q, k, v, inputs.segments)


def _attend_backward(g, q, k, v, out, lse, inputs, kinds, recipe):
  q, k, v = _read_by_products((q, k, v), recipe)
  if recipe.attention_compute == "fp8":
    residuals = FP8AttentionResiduals(out, lse)
    run = functools.partial(
      fp8_attention_backward, recipe=recipe, dtype=g.dtype
    )
  else:
    residuals = AttentionResiduals(out, lse)
    run = functools.partial(
      ops.attention_bwd, implementation=recipe.implementation
    )
  run = of_kind(run, kinds, inputs.kind)
  return run(g, q, k, v, residuals, inputs.segments)


def _read_by_products(arrays, recipe):
  """q, k, v as attention's products read them."""
  if recipe.attention_compute == "bf16":
    return arrays
  return tuple(per_tensor(x, recipe) for x in arrays)


def _attention_fwd(q, k, v, inputs, kinds, recipe):
  dtype = q.dtype
  read = _read_by_products((q, k, v), recipe)
  q, k, v = save_residual("attention", read)
  kept = _attend(q, k, v, inputs, kinds, recipe)
  kept = save_residual("attention", kept)
  # The very array that is saved, so that it is held once.
  return _values(kept.out, dtype), (q, k, v, kept)


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
    window: of these a query sees only the last so many, its own among them, as
      with `sliding_window` in transformers; None for all.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves
      them as they are.
    scale: what q k^T is multiplied by; None for 1 / sqrt(H).
    segments: int32 [B, T] where S = T, as of packed documents or of padding: a
      query sees keys of its own segment; None for one segment.
    recipe: its implementation, its axes of a mesh, and whether products read
      FP8 (`attention_compute`); None for BF16 products on one device.

  Returns:
    [B, T, N, H] in q's dtype.

  Raises:
    TypeError: an argument of another kind.
    ValueError: shapes that do not fit one another; a window below 1 or where
      attention is not causal; a cap or a scale that is not above 0.
  """
  op = "dot_product_attention"
  recipe = recipes.bf16() if recipe is None else recipe
  _check(op, recipe, q=q, k=k, v=v)
  kind = AttentionKind(causal, window, soft_cap, scale)
  inputs = HeadsInputs(segments)
  return _attention((q, k, v, inputs), kind, recipe)


def _check(op: str, recipe: Any, **heads: Any) -> None:
  """Raises where these are no recipe and no heads."""
  check_recipe(op, recipe)
  for name, x in heads.items():
    check_float(op, name, x, ndim=4)


class HeadsSaved(NamedTuple):
  """What attention saves for the backward of a block."""

  q: Array | QTensor | None  # None where they are computed again.
  k: Array | QTensor | None
  v: Array | QTensor
  out: Array | QTensor
  lse: Array
  out_scale: Array | None  # See `scale_of`.
  inputs: HeadsInputs


@dataclasses.dataclass(frozen=True)
class HeadsAttention(Middle):
  """Attention of heads (q, k, v) that are given; their gradients are plain.

  `inputs` are `HeadsInputs`.

  Attributes:
    kind: which keys a query sees and what a score is; or a tuple of that, where
      a stack has layers of several kinds.
  """

  kind: Kinds

  def plain(self, h, weights, inputs, recipe):
    del weights
    return _merge_heads(_attention((*h, inputs), self.kind, recipe))

  def forward(self, h, weights, inputs, recipe):
    del weights
    keep, read = attention_storage(recipe, h[0].dtype)
    q, k, v = save_residual("attention", tuple(map(keep, h)))
    # What is kept of q may be FP8; codes wait for q itself.
    out = self.attend(read(q), read(k), v, inputs, recipe, after=h[0])
    return out._replace(saved=out.saved._replace(q=q, k=k))

  def attend(self, q, k, v, inputs, recipe, *, after) -> MiddleOutput:
    """`forward` for a caller who saves what q and k are computed from.

    Args:
      q, k: what attention reads, or what it quantizes; they are not saved.
      v: as `attention_storage` saves it.
      inputs: as of `forward`.
      recipe: as of the block.
      after: see `MiddleOutput`.
    """
    keep, read = attention_storage(recipe, after.dtype)
    inputs = save_residual("attention", inputs)
    out, lse = _attend(q, k, read(v), inputs, self.kind, recipe)
    out, lse = save_residual("attention", (keep(out), lse))
    out_q = _projected(read(out), recipe, dtype=after.dtype)
    saved = HeadsSaved(None, None, v, out, lse, scale_of(out_q), inputs)
    return MiddleOutput(out_q, saved, after=after)

  def restore(self, saved, dtype, recipe):
    _, read = attention_storage(recipe, dtype)
    q, k = (None if x is None else read(x) for x in (saved.q, saved.k))
    v, out = read(saved.v), read(saved.out)
    operand = _projected(
      out, recipe, dtype=dtype, scale=saved.out_scale, layout="columns"
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
  """How q, k, v and the output are saved, and read back in `dtype`.

  Where products read FP8, codes are saved that are read as they are.
  """
  if recipe.attention == "bf16":
    return (lambda x: x), (lambda x: x)
  if recipe.attention_compute == "fp8":
    return functools.partial(per_tensor, recipe=recipe), (lambda x: x)
  group_size = recipe.group_size
  keep = functools.partial(
    ops.quantize_groups,
    group_size=group_size,
    dtype=recipe.formats.values,
    implementation=recipe.implementation,
  )
  read = functools.partial(dequantize, group_size=group_size, dtype=dtype)
  return keep, read


def _values(x: Array | QTensor, dtype: DTypeLike) -> Array:
  """What codes with one scale stand for, in `dtype`; arrays as they are."""
  if isinstance(x, QTensor):
    return dequantize(x, group_size=None, dtype=dtype)
  return x


def _projected(
  out: Array | QTensor,
  recipe: CoatRecipe,
  *,
  dtype: DTypeLike,
  scale: Array | None = None,
  layout: ops.Layout = "rows",
) -> Operand:
  """Attention's output as the projection reads it; codes as they are."""
  if isinstance(out, Array) or recipe.scaling == "block":
    values = _merge_heads(_values(out, dtype))
    return quantized(values, recipe, scale=scale, layout=layout)
  codes = _merge_heads(out.qvalue)
  if layout == "rows":
    return Operand(codes, None, out.scale)
  return Operand(None, codes.reshape(-1, codes.shape[-1]).T, out.scale)


def _merge_heads(x: Array) -> Array:
  """[B, T, N, H] to [B, T, N H]."""
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
    causal: whether a query sees only keys up to its own place.
    window, soft_cap, scale, segments: as of `dot_product_attention`.
    recipe: fused where `nonlinear` is "fp8"; `attention` says how q, k, v
      and the output are saved.
    cache: of w, from `layers.cache_weight`, or None.

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    TypeError, ValueError: as of `dot_product_attention`; another w.
  """
  op = "attention_output"
  _check(op, recipe, q=q, k=k, v=v)
  check_float(op, "x", x, ndim=3)
  want = q.shape[2] * q.shape[3], x.shape[-1]
  # On a mesh a caller's own shard_map has other shares of it.
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
  return run_whole(jnp.add, recipe.axes, x, y)
