# SPDX-License-Identifier: Apache-2.0
"""The attention half of a decoder layer, as a module.

norm -> q, k, v (one product) -> RoPE -> attention -> output projection -> add.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.layers.linear import Linear, default_kernel_init
from coat_jax.layers.module import RecipeModule, rows_to_batch, value_of
from coat_jax.layers.norm_linear import NormLinear
from coat_jax.layers.rope import Heads
from coat_jax.layers.self_attention import AttentionWeights, self_attention
from coat_jax.recipe import CoatRecipe


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
      split="inputs",
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
    if positions is None:
      positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    norm, qkv = self.qkv.norm, self.qkv.linear
    weights = AttentionWeights(
      gamma=value_of(norm.scale),
      beta=value_of(norm.bias),
      qkv=qkv.kernel[...],
      qkv_bias=value_of(qkv.bias),
      out=self.out.kernel[...],
      out_bias=value_of(self.out.bias),
      qkv_cache=qkv.cache,
      out_cache=self.out.cache,
    )
    y = self_attention(
      x,
      weights,
      positions,
      kind=norm.kind,
      eps=norm.epsilon,
      heads=Heads(self.num_heads, self.num_kv_heads, self.rope_theta),
      causal=self.causal,
      clip=self.clip_qkv,
      recipe=self.active_recipe,
    )
    return y.reshape(shape)
