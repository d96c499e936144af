# SPDX-License-Identifier: Apache-2.0
"""The attention block: `layers.SelfAttention` between two linear layers."""

import functools
import math
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax.layers.block import block
from coat_jax.layers.block_module import (
  BlockOptions,
  NormLinear,
  NormLinearOptions,
  Parts,
  block_arguments,
)
from coat_jax.layers.dot_product_attention import AttentionInputs
from coat_jax.layers.module import RecipeModule, Sharding, reshard
from coat_jax.layers.norm import RMSNorm
from coat_jax.layers.qk_norm import NormedOver, QKNorm, QKNormWeights
from coat_jax.layers.rope import Heads
from coat_jax.layers.self_attention import (
  Bases,
  Scalings,
  SelfAttention,
  Windows,
  attention_kinds,
  count_kinds,
  rotaries,
)
from coat_jax.numerics.checks import check_array, check_choice


class Attention(RecipeModule):
  """Grouped-query self-attention with norm, RoPE and residual add.

  x + post_norm(attention(RoPE(norm(x) w_qkv)) w_out).

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import Attention
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> attention = Attention(
    ...   64, 4, num_kv_heads=2, recipe=recipes.coat(), rngs=nnx.Rngs(0)
    ... )
    >>> attention(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> attention.qkv.linear.kernel.shape
    (64, 128)

  Attributes:
    middle: `SelfAttention`, which holds the options for heads, RoPE and masks.
    qkv: NormLinear that computes q, k and v. The columns of its kernel are
      ordered by key head: the query heads that share the first key head, this
      key head, its value head, and so on for the next key head.
    out: Linear [num_heads * head_dim, features].
    post_norm: RMSNorm or LayerNorm, or None.
    q_norm, k_norm: RMSNorms of q and k, or None. With `qk_norm="head"`, each
      has a scale [head_dim]. With "all", the scale of `q_norm` is
      [num_heads * head_dim], and that of `k_norm` [num_kv_heads * head_dim].
  """

  def __init__(
    self,
    features: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
    window: Windows = None,
    soft_cap: float | None = None,
    query_scale: float | None = None,
    rope_theta: Bases = 1e4,
    rope_scaling: Scalings = None,
    rotary_dim: int | None = None,
    qk_norm: NormedOver | None = None,
    clip_qkv: float | None = None,
    use_qkv_bias: bool | None = None,
    use_out_bias: bool | None = None,
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      num_heads: N, number of query heads.
      num_kv_heads: K, number of key heads and of value heads, each shared by
        N / K query heads; None for N.
      head_dim: H, width of a head, an even number; None for D / N.
      causal: whether a query sees only keys up to its own position.
      window: number of keys that a query sees, counted back from its own
        position; None for all. If the layers of a stack differ, pass a tuple
        with one window for each kind of layer, and pass `kind` to each call.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves
        them unchanged.
      query_scale: q k^T is multiplied by this number; None for 1 / sqrt(H).
      rope_theta: base of RoPE's frequencies; None for no RoPE; or a tuple with
        one entry for each kind of layer.
      rope_scaling: scaling of RoPE's frequencies for longer sequences, such as
        `Llama3Scaling`; None for no scaling; or a tuple with one entry for each
        kind of layer.
      rotary_dim: RoPE rotates the first `rotary_dim` channels of each head, or
        all if None.
      qk_norm: RMSNorm of q and of k before RoPE: "head" normalizes each head
        separately, "all" normalizes all heads of a token together; None for no
        norm. If `recipe.nonlinear` is "fp8", norms save their inputs in FP8.
      clip_qkv: q, k and v are clipped to [-clip_qkv, clip_qkv]; None for no
        clipping.
      use_qkv_bias: whether q, k and v have a bias [(N + 2 K) H]; None for the
        value of `use_bias`.
      use_out_bias: whether the output projection has a bias [D]; None for the
        value of `use_bias`.
      rngs: its `params` stream provides the keys for initializers.
      **options: see `BlockOptions`. The kernels are [D, (N + 2 K) H] and
        [N H, D].

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range; num_heads is not divisible by
        num_kv_heads; features is not divisible by num_heads and `head_dim` is
        None; the head size is odd; `rotary_dim` is odd or above the head size;
        `qk_norm` or a norm is unknown; tuples differ in length; a window is
        below 1 or set without `causal`.
    """
    parts = Parts.of("Attention", options, rngs)
    super().__init__(
      **parts.shared,
      features=features,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
    )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % kv_heads:
      raise ValueError(
        "Attention: num_heads must be a multiple of num_kv_heads, got "
        f"{num_heads} and {kv_heads}; leave num_kv_heads out to use as many "
        "key heads as query heads"
      )
    if head_dim is None and features % num_heads:
      raise ValueError(
        "Attention: features must be a multiple of num_heads, got "
        f"{features} and {num_heads}; change one of them, or pass head_dim"
      )
    self.head_dim = head_dim or features // num_heads
    if self.head_dim % 2:
      raise ValueError(
        "Attention: the head size must be even, because RoPE rotates pairs of "
        f"channels, got {self.head_dim}; pass an even head_dim, or another "
        "num_heads"
      )
    check_choice("Attention", "qk_norm", qk_norm, ("head", "all", None))
    self.num_heads, self.num_kv_heads = num_heads, kv_heads
    self.causal, self.rope_theta = causal, rope_theta
    self.add_input = parts.add_input
    count_kinds(window=window, rope_theta=rope_theta, rope_scaling=rope_scaling)
    rotary = rotaries(
      rope_theta, rope_scaling, rotary_dim, head_dim=self.head_dim
    )
    self.middle = SelfAttention(
      Heads(num_heads, kv_heads, rotary),
      attention_kinds(causal, window, soft_cap, query_scale),
      clip_qkv,
      None if qk_norm is None else QKNorm(qk_norm, parts.epsilon),
    )
    front: Any = {
      name: value
      for name, value in options.items()
      if name in NormLinearOptions.__annotations__
    }
    use_bias = parts.use_bias if use_qkv_bias is None else use_qkv_bias
    columns = (num_heads + 2 * kv_heads) * self.head_dim
    self.qkv = NormLinear(
      features, columns, use_bias=use_bias, rngs=rngs, **front
    )
    use_bias = parts.use_bias if use_out_bias is None else use_out_bias
    self.out = parts.make_back(
      num_heads * self.head_dim, features, use_bias=use_bias
    )
    self.post_norm = parts.make_norm(parts.post_norm, features)
    self.q_norm: Any = nnx.data(None)
    self.k_norm: Any = nnx.data(None)
    if qk_norm is not None:
      of_q, of_k = (n if qk_norm == "all" else 1 for n in (num_heads, kv_heads))
      make = functools.partial(
        RMSNorm,
        epsilon=parts.epsilon,
        scale_plus_one=parts.scale_plus_one,
        **parts.shared,
      )
      self.q_norm = make(of_q * self.head_dim)
      self.k_norm = make(of_k * self.head_dim)

  def __call__(
    self,
    x: Array,
    positions: Array | None = None,
    segments: Array | None = None,
    kind: Array | None = None,
    *,
    out_sharding: Sharding = None,
  ) -> Array:
    """Computes attention within each sequence, or within each segment.

    Args:
      x: [..., T, features], cast to `dtype`.
      positions: the tokens' positions for RoPE, int32 [T], or [..., T] if they
        differ between sequences; None for 0 to T - 1.
      segments: segment ids, int32 [..., T], for packed documents or padding; a
        query sees only keys of its own segment. None for one segment. For
        packed documents, pass `positions` that restart at 0 in each document.
      kind: int32 scalar, the index of this layer's entry in the constructor's
        tuples; None if no tuple was passed.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., T, features] in `dtype`.

    Raises:
      TypeError: x is not an array of numbers; `positions` or `segments` is not
        an array of integers; a required `kind` is not an integer.
      ValueError: shapes are inconsistent; `kind` is out of range (not checked
        if it is a JAX array, whose value may be unknown).
    """
    rule, remedy = "an array [..., T, D]", "pass sequences of activations"
    ranks = range(2, 65)
    check_array(
      "Attention", "x", x, rule, ndim=ranks, kind=jnp.number, remedy=remedy
    )
    shape = x.shape
    # Don't use reshape(-1, ...), which fails for an empty batch.
    batch = math.prod(shape[:-2])
    x = self.cast(x, self.out.kernel).reshape(batch, *shape[-2:])
    for name, each, rule in (
      ("positions", positions, "an integer array [T] or [..., T]"),
      ("segments", segments, "an integer array [..., T]"),
    ):
      if each is not None:
        remedy = "pass one per token"
        check_array(
          "Attention", name, each, rule, kind=jnp.integer, remedy=remedy
        )
    if positions is None:
      positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    elif positions.ndim > 1 and positions.shape == shape[:-1]:
      positions = positions.reshape(x.shape[:2])
    if segments is not None and segments.shape == shape[:-1]:
      segments = segments.reshape(x.shape[:2])
    middle = self.middle
    inputs = AttentionInputs(
      positions, segments, kind if middle.num_kinds > 1 else None
    )
    y = block(
      x,
      inputs=inputs,
      middle=middle,
      **block_arguments(
        self, self.qkv.norm, self.qkv.linear, self.out, self.qk_weights
      ),
    )
    return reshard(y.reshape(shape), out_sharding)

  @property
  def qk_weights(self) -> QKNormWeights | None:
    """The weights of the norms of q and k; None without these norms."""
    if self.q_norm is None:
      return None
    return QKNormWeights(self.q_norm.gamma, self.k_norm.gamma)
