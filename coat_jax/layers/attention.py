# SPDX-License-Identifier: Apache-2.0
"""The attention block's module; `layers.self_attention` computes it."""

import functools
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.back import BackWeights
from coat_jax.layers.block import BlockWeights
from coat_jax.layers.front import FrontWeights
from coat_jax.layers.layer_kinds import (
  Bases,
  Scalings,
  Windows,
  attention_kinds,
  count_kinds,
  rotaries,
)
from coat_jax.layers.linear import Linear
from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  check_sequences,
  recipe_of,
  reshard,
  rows_to_batch,
)
from coat_jax.layers.norm import RMSNorm, block_norm_options, make_norm
from coat_jax.layers.norm_linear import NormLinear
from coat_jax.layers.parameters import BlockOptions, options_by_part
from coat_jax.layers.qk_norm import NormedOver, QKNorm, QKNormWeights
from coat_jax.layers.rope import Heads
from coat_jax.layers.self_attention import SelfAttention, self_attention
from coat_jax.numerics.recipes import CoatRecipe


class Attention(RecipeModule):
  """Self-attention with its norm, RoPE, grouped key heads and residual add.

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
    rotary: RoPE's `Rotary`, or None; or a tuple, see `rope_theta`.
    qkv: NormLinear to the columns of q, k and v. They are ordered by key head:
      for each of the K key heads its N / K query heads, its key, its value, so
      that a shard of the columns holds whole groups of heads.
    out: Linear [num_heads * head_dim, features].
    post_norm: RMSNorm or LayerNorm; None without this norm.
    q_norm, k_norm: RMSNorms of q and k, or None: of [head_dim] with
      `qk_norm="head"`; with "all" of [num_heads * head_dim] and of
      [num_kv_heads * head_dim], the heads in their order.
  """

  counterparts = (nnx.MultiHeadAttention,)

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
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind | None = "rms",
    post_norm: ops.NormKind | None = None,
    epsilon: float = 1e-6,
    use_scale: bool = True,
    scale_plus_one: bool = False,
    use_norm_bias: bool = False,
    use_bias: bool = False,
    use_qkv_bias: bool | None = None,
    use_out_bias: bool | None = None,
    add_input: bool = True,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
    **options: Unpack[BlockOptions],
  ):
    """Initializes the parameters.

    Args:
      features: D, width of input and output.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads, each shared by N / K query heads;
        None for N.
      head_dim: H, width of a head, even; None for D / N.
      causal: whether a query sees only keys up to its own position.
      window: how many keys a query sees, including its own and those before it;
        None for all. If layers of a stack differ, a tuple with one window for
        each kind of layer; the call then passes `kind`. The same holds for the
        arguments below that accept a tuple.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves
        them unchanged.
      query_scale: factor of q k^T; None for 1 / sqrt(H).
      rope_theta: base of RoPE's frequencies; None for no RoPE. Or a tuple.
      rope_scaling: how they are scaled to longer sequences, such as
        `Llama3Scaling`; None for no scaling. Or a tuple.
      rotary_dim: how many of a head's first channels RoPE rotates; None for
        all.
      qk_norm: RMSNorm of q and of k before RoPE: "head" normalizes each head by
        itself; "all", all heads of a token together; None for none. FP8 recipes
        save q and k before this norm, in FP8.
      clip_qkv: largest magnitude of q, k and v; None leaves them unchanged.
      recipe: what is computed and saved in FP8; None for `recipes.coat()`.
      norm: norm of the input, "rms" or "layer"; None for none.
      post_norm: norm of the second product, before the input is added, "rms" or
        "layer"; None for none. OLMo 2 uses only this norm, Gemma 2 and 3 use
        both.
      epsilon: added by norms to the mean square or the variance.
      use_scale: whether norms have a scale [D].
      scale_plus_one: whether norms, including those of q and k, multiply by 1 +
        scale, as in Gemma.
      use_norm_bias: whether norms have a bias [D].
      use_bias: whether both products have biases.
      use_qkv_bias: whether q, k and v have a bias [(N + 2 K) H]; None for
        `use_bias`.
      use_out_bias: whether the output projection has a bias [D]; None for
        `use_bias`.
      add_input: whether the block adds its input, the residual stream.
      dtype: dtype of input, output and everything that is not FP8; None
        promotes the input and the parameters.
      param_dtype: dtype of the parameters and their gradients.
      rngs: its stream `params` initializes the parameters.
      **options: initializers and metadata of the parameters, see
        `BlockOptions`, of kernels [D, (N + 2 K) H] and [N H, D]; flax's other
        arguments are refused.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is outside its range; num_heads is not divisible by
        num_kv_heads, or features is not divisible by num_heads although
        `head_dim` is None; heads have an odd size; `rotary_dim` is odd or above
        that size; `qk_norm` is unknown; tuples differ in length; a window is
        below 1 or set without `causal`; a flax argument is not supported by FP8
        attention.
    """
    of = options_by_part(options)
    super().__init__(recipe_of(type(self).__name__, recipe), dtype, of.others)
    self._check(
      param_dtype,
      rngs,
      features=features,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
    )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % kv_heads:
      raise ValueError(
        "Attention: num_heads must be a multiple of num_kv_heads, got "
        f"{num_heads} and {kv_heads}; leave num_kv_heads out for no sharing"
      )
    if head_dim is None and features % num_heads:
      raise ValueError(
        "Attention: features must be a multiple of num_heads, got "
        f"{features} and {num_heads}; or pass head_dim"
      )
    self.head_dim = head_dim or features // num_heads
    if self.head_dim % 2:
      raise ValueError(
        "Attention: heads must have an even size, for RoPE rotates pairs, got "
        f"{self.head_dim}; pass an even head_dim, or another num_heads"
      )
    if qk_norm not in ("head", "all", None):
      raise ValueError(
        f"Attention: qk_norm must be 'head', 'all' or None, got {qk_norm!r}; "
        "pass one of these"
      )
    self.num_heads, self.num_kv_heads = num_heads, kv_heads
    self.causal, self.rope_theta = causal, rope_theta
    self.window, self.soft_cap = window, soft_cap
    self.query_scale = query_scale
    count_kinds(window=window, rope_theta=rope_theta, rope_scaling=rope_scaling)
    self.rotary = rotaries(
      rope_theta, rope_scaling, rotary_dim, head_dim=self.head_dim
    )
    kinds = attention_kinds(causal, window, soft_cap, query_scale)
    heads = Heads(num_heads, kv_heads, self.rotary)
    SelfAttention(heads, kinds, clip_qkv)  # Checks the arguments.
    self.clip_qkv, self.add_input = clip_qkv, add_input
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.qkv = NormLinear(
      features,
      (num_heads + 2 * kv_heads) * self.head_dim,
      norm=norm,
      epsilon=epsilon,
      use_scale=use_scale,
      scale_plus_one=scale_plus_one,
      use_norm_bias=use_norm_bias,
      use_bias=use_bias if use_qkv_bias is None else use_qkv_bias,
      **shared,
      **of.norm_linear,
    )
    self.out = Linear(
      num_heads * self.head_dim,
      features,
      use_bias=use_bias if use_out_bias is None else use_out_bias,
      split="inputs",
      **shared,
      **of.back,
    )
    self.post_norm = make_norm(
      post_norm,
      features,
      epsilon=epsilon,
      use_scale=use_scale,
      scale_plus_one=scale_plus_one,
      use_bias=use_norm_bias,
      **shared,
      **of.norm,
    )
    self.q_norm: Any = nnx.data(None)
    self.k_norm: Any = nnx.data(None)
    if qk_norm is not None:
      of_q, of_k = (n if qk_norm == "all" else 1 for n in (num_heads, kv_heads))
      make = functools.partial(
        RMSNorm, epsilon=epsilon, scale_plus_one=scale_plus_one, **shared
      )
      self.q_norm = make(of_q * self.head_dim)
      self.k_norm = make(of_k * self.head_dim)
    self.qk_norm: NormedOver | None = qk_norm

  def __call__(
    self,
    x: Array,
    positions: Array | None = None,
    segments: Array | None = None,
    kind: Array | None = None,
    *,
    out_sharding: Sharding = None,
  ) -> Array:
    """Attends within each sequence, or within its segments.

    Args:
      x: [..., T, features], cast to `dtype`.
      positions: int32 [T] for RoPE, or [..., T] if sequences have their own;
        None for 0 to T - 1.
      segments: int32 [..., T], ids such as those of packed documents or
        padding: a query sees keys of its own segment; None for one segment. (In
        packed documents, positions restart at 0 in each document.)
      kind: int32 scalar, the index into the constructor's tuples; None without
        tuples.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., T, features] in `dtype`.

    Raises:
      ValueError: shapes are inconsistent, or `kind` is missing although layers
        differ.
    """
    check_sequences("Attention", x)
    shape = x.shape
    x = rows_to_batch(self.cast(x, self.out.kernel))
    if positions is None:
      positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    elif positions.ndim > 1 and positions.shape == shape[:-1]:
      positions = positions.reshape(x.shape[:2])
    if segments is not None and segments.shape == shape[:-1]:
      segments = segments.reshape(x.shape[:2])
    qk_norm, qk_norm_weights = self.norm_of_qk
    y = self_attention(
      x,
      BlockWeights(
        FrontWeights.of(self.qkv.norm, self.qkv.linear),
        BackWeights.of(self.out, self.post_norm),
        qk_norm_weights,
      ),
      positions,
      **block_norm_options(self.qkv.norm, self.post_norm),
      heads=Heads(self.num_heads, self.num_kv_heads, self.rotary),
      causal=self.causal,
      window=self.window,
      soft_cap=self.soft_cap,
      scale=self.query_scale,
      segments=segments,
      layer_kind=kind,
      clip=self.clip_qkv,
      qk_norm=qk_norm,
      add_input=self.add_input,
      recipe=self.active_recipe,
    )
    return reshard(y.reshape(shape), out_sharding)

  @property
  def kind(self) -> ops.AttentionKind | tuple[ops.AttentionKind, ...]:
    """The keys that queries see; a tuple if `window` is a tuple."""
    return attention_kinds(
      self.causal, self.window, self.soft_cap, self.query_scale
    )

  @property
  def norm_of_qk(self) -> tuple[QKNorm | None, QKNormWeights | None]:
    """The norm of q and k, and its weights."""
    if self.qk_norm is None:
      return None, None
    q, k = self.q_norm, self.k_norm
    weights = QKNormWeights(q.gamma, k.gamma)
    return QKNorm(self.qk_norm, q.epsilon), weights
