# SPDX-License-Identifier: Apache-2.0
"""The attention half of a decoder layer.

norm -> q, k, v (one product) -> RoPE -> attention -> output projection -> add.

The first two are one block, `norm_linear`. Attention, output projection and
residual add are another: they share the attention's output, which the backward
of both reads. Remembered there: q, k, v, output and log-sum-exp; BF16, or with
recipe.attention="fp8" 1 x G FP8, and then the forward attends to the
dequantized q, k, v and projects the dequantized output. (The softmax's backward
takes its row sums from that output: an error of the output's rounding.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E5M2
from coat_jax.layers.linear import (
  Linear,
  add_linear,
  default_kernel_init,
  keep_scale,
  linear,
  sum_rows,
)
from coat_jax.layers.module import RecipeModule, rows_to_batch, value_of
from coat_jax.layers.norm_linear import NormLinear
from coat_jax.layers.residuals import cotangent, hand_over, remember
from coat_jax.layers.rope import Heads, split_heads
from coat_jax.layers.weight import quantized_weight
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor, dequantize
from coat_jax.recipe import CoatRecipe


@functools.partial(jax.custom_vjp, nondiff_argnames=("causal", "how"))
def _attention(q, k, v, causal, how):
  return _attention_fwd(q, k, v, causal, how)[0]


def _attention_fwd(q, k, v, causal, how):
  q, k, v = remember("attention", (q, k, v))
  kept = ops.attention_fwd(q, k, v, causal=causal, implementation=how)
  kept = remember("attention", kept)
  # The very array that is remembered, so that it is held once.
  return kept.out, (q, k, v, kept)


def _attention_bwd(causal, how, kept, g):
  return ops.attention_bwd(g, *kept, causal=causal, implementation=how)


_attention.defvjp(_attention_fwd, _attention_bwd)


def dot_product_attention(
  q: Array,
  k: Array,
  v: Array,
  *,
  causal: bool = True,
  implementation: ops.Implementation | None = None,
) -> Array:
  """softmax(q k^T / sqrt(H)) v, remembering q, k, v, out and log-sum-exp.

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H], N a multiple of K.
    causal: query t sees keys up to t + S - T.
    implementation: None for cuDNN's on a GPU where it can, else "xla".

  Returns:
    [B, T, N, H] in q's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  return _attention(q, k, v, causal, implementation)


class _Residuals(NamedTuple):
  q: Array | QTensor
  k: Array | QTensor
  v: Array | QTensor
  out: Array | QTensor
  lse: Array
  out_scale: Array
  w: Array
  cache: Operand
  bias: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnames=("causal", "recipe"))
def _attention_output(x, q, k, v, w, bias, cache, causal, recipe):
  return _attention_output_fwd(x, q, k, v, w, bias, cache, causal, recipe)[0]


def _attention_output_fwd(x, q, k, v, w, bias, cache, causal, recipe):
  keep, read = _storage(recipe, q.dtype)
  how = recipe.implementation
  q, k, v = remember("attention", (keep(q), keep(k), keep(v)))
  out, lse = ops.attention_fwd(
    read(q), read(k), read(v), causal=causal, implementation=how
  )
  out, lse = remember("attention", (keep(out), lse))
  out_q = ops.quantize_tensor(_merge_heads(read(out)), implementation=how)
  w_q = quantized_weight(w, cache, "columns", recipe)
  total = add_linear(x, out_q, w_q, bias, recipe)
  cache = keep_scale(cache, w_q)
  scale = remember("linear", out_q.scale)
  residuals = _Residuals(q, k, v, out, lse, scale, w, cache, bias)
  return total, hand_over(residuals)


def _attention_output_bwd(causal, recipe, residuals, g):
  r, how = residuals, recipe.implementation
  _, read = _storage(recipe, g.dtype)
  q, k, v, out = read(r.q), read(r.k), read(r.v), read(r.out)
  g_q = ops.quantize_tensor(g, dtype=E5M2, layout="both", implementation=how)
  out_q = ops.quantize_tensor(
    _merge_heads(out), scale=r.out_scale, layout="columns", implementation=how
  )
  dw = ops.linear_wgrad(out_q, g_q, dtype=r.w.dtype, implementation=how)
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
  return g, dq, dk, dv, dw, cotangent(sum_rows(g), r.bias), None


_attention_output.defvjp(_attention_output_fwd, _attention_output_bwd)


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
    return _attention_output(x, q, k, v, w, bias, cache, causal, recipe)
  out = dot_product_attention(
    q, k, v, causal=causal, implementation=recipe.implementation
  )
  return x + linear(_merge_heads(out), w, bias, recipe=recipe, cache=cache)


@functools.partial(jax.custom_vjp, nondiff_argnames=("limit",))
def _clip(x, limit):
  return jnp.clip(x, -limit, limit)


def _clip_fwd(x, limit):
  # One bit a value; autodiff would keep two BF16 arrays, 6 U for q, k and v.
  inside = jnp.packbits(jnp.abs(x) <= limit, axis=-1)
  return _clip(x, limit), remember("attention", inside)


def _clip_bwd(limit, inside, g):
  passes = jnp.unpackbits(inside, axis=-1, count=g.shape[-1])
  return (jnp.where(passes == 1, g, 0),)


_clip.defvjp(_clip_fwd, _clip_bwd)


class Attention(RecipeModule):
  """Self-attention with its norm, RoPE, grouped key heads and residual add.

  Attributes:
    qkv: NormLinear to the columns of q, k and v. They are ordered by key head:
      for each of the K key heads its N / K query heads, its key, its value, so
      that a shard of the columns holds whole groups of heads.
    out: Linear [num_heads * head_dim, features].
  """

  def __init__(
    self,
    features: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
    rope_theta: float | None = 1e4,
    clip_qkv: float | None = None,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind = "rms",
    epsilon: float = 1e-6,
    use_scale: bool = True,
    use_norm_bias: bool = False,
    use_bias: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer = default_kernel_init,
    out_init: nnx.Initializer | None = None,
    rngs: nnx.Rngs,
  ):
    super().__init__(recipe or recipes.coat(), dtype)
    kv_heads = num_kv_heads or num_heads
    if num_heads % kv_heads:
      raise ValueError(
        "Attention: num_heads must be a multiple of num_kv_heads, got "
        f"{num_heads} and {kv_heads}"
      )
    if head_dim is None and features % num_heads:
      raise ValueError(
        "Attention: features must be a multiple of num_heads, got "
        f"{features} and {num_heads}; or pass head_dim"
      )
    self.head_dim = head_dim or features // num_heads
    self.num_heads, self.num_kv_heads = num_heads, kv_heads
    self.causal, self.rope_theta = causal, rope_theta
    self.clip_qkv = clip_qkv
    shared: dict[str, Any] = dict(
      recipe=self.recipe,
      dtype=dtype,
      param_dtype=param_dtype,
      use_bias=use_bias,
      rngs=rngs,
    )
    self.qkv = NormLinear(
      features,
      (num_heads + 2 * kv_heads) * self.head_dim,
      norm=norm,
      epsilon=epsilon,
      use_scale=use_scale,
      use_norm_bias=use_norm_bias,
      kernel_init=kernel_init,
      **shared,
    )
    self.out = Linear(
      num_heads * self.head_dim,
      features,
      kernel_init=out_init or kernel_init,
      **shared,
    )

  def __call__(self, x: Array, positions: Array | None = None) -> Array:
    """Attends within each sequence.

    Args:
      x: [..., T, features].
      positions: int32 [T] for RoPE; None for 0 to T - 1.

    Returns:
      [..., T, features] in `dtype`.
    """
    shape = x.shape
    x = rows_to_batch(x.astype(self.dtype))
    q, k, v = self._split_heads(self.qkv(x), positions)
    y = attention_output(
      x,
      q,
      k,
      v,
      self.out.kernel[...],
      value_of(self.out.bias),
      causal=self.causal,
      recipe=self.active_recipe,
      cache=self.out.cache,
    )
    return y.reshape(shape)

  def _split_heads(
    self, qkv: Array, positions: Array | None
  ) -> tuple[Array, Array, Array]:
    """[B, T, columns] to q [B, T, N, H] and k, v [B, T, K, H], rotated."""
    if self.clip_qkv is not None:
      qkv = _clip(qkv, self.clip_qkv)
    b, t, _ = qkv.shape
    if self.rope_theta is not None:
      if positions is None:
        positions = jnp.arange(t, dtype=jnp.int32)
      heads = Heads(self.num_heads, self.num_kv_heads, self.rope_theta)
      how = self.active_recipe.implementation
      return split_heads(qkv, positions, heads, implementation=how)
    heads = self.num_heads // self.num_kv_heads
    qkv = qkv.reshape(b, t, self.num_kv_heads, heads + 2, self.head_dim)
    q = qkv[..., :heads, :].reshape(b, t, self.num_heads, self.head_dim)
    return q, qkv[..., heads, :], qkv[..., heads + 1, :]
