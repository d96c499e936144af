# SPDX-License-Identifier: Apache-2.0
"""The attention block: norm, q, k and v, RoPE, attention, projection and add.

q, k and v are one product. Their gradients go from attention's backward to the
E5M2 operand of that product in one pass, where nothing else reads them: a bias
needs their sums before they are rounded, and clipping comes between.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.layers.attention_output import HeadsAttention, HeadsSaved
from coat_jax.layers.back import BackWeights
from coat_jax.layers.block import BlockWeights, block
from coat_jax.layers.front import FrontWeights
from coat_jax.layers.linear import Linear, gradient_operand
from coat_jax.layers.mesh.rule import run_whole
from coat_jax.layers.middle import Middle, MiddleGradient
from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  reshard,
  rows_to_batch,
)
from coat_jax.layers.norm import block_norm_options, make_norm
from coat_jax.layers.norm_linear import NormLinear
from coat_jax.layers.parameters import BlockOptions, options_by_part
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rope import Heads, split_heads
from coat_jax.ops.rope import rotation
from coat_jax.recipe import CoatRecipe


class _Saved(NamedTuple):
  heads: HeadsSaved
  positions: Array
  inside: Array | None  # Bits: what clipping left alone.


@dataclasses.dataclass(frozen=True)
class SelfAttention(Middle):
  """q, k and v of h taken apart, clipped and rotated; and attention.

  `inputs` are positions, int32 [T].

  Attributes:
    heads: N, K and the base of RoPE's frequencies, or None for no RoPE.
    causal: whether a query sees only keys up to its own place.
    clip: largest magnitude of q, k and v, or None.
  """

  heads: Heads
  causal: bool = True
  clip: float | None = None

  def plain(self, h, weights, inputs, recipe):
    clip = functools.partial(_clip, limit=self.clip)
    clipped: Any = run_whole(clip, recipe.axes, h)
    heads = split_heads(clipped, inputs, self.heads, recipe=recipe)
    return self._attention.plain(heads, weights, None, recipe)

  def forward(self, h, weights, inputs, recipe):
    n, k, _ = self.heads.of_device(recipe.axes)
    h, inside = _clip_fwd(h, self.clip)
    positions = save_residual("rope", inputs)
    heads = ops.split_heads(
      h,
      *self._angles(positions, h.shape[-1] // (n + 2 * k)),
      num_heads=n,
      num_kv_heads=k,
      implementation=recipe.implementation,
    )
    out = self._attention.forward(heads, weights, None, recipe)
    return out._replace(saved=_Saved(out.saved, positions, inside))

  def restore(self, saved, dtype, recipe):
    heads, operand = self._attention.restore(saved.heads, dtype, recipe)
    return saved._replace(heads=heads), operand

  def backward(self, saved, dout, weights, recipe, *, has_bias):
    how = recipe.implementation
    dheads = self._attention.backward(
      saved.heads, dout, weights, recipe, has_bias=False
    ).h
    angles = self._angles(saved.positions, dheads[0].shape[-1])
    if self.clip is None and not has_bias:
      dh = ops.join_heads_operand(
        *dheads, *angles, dtype=recipe.formats.gradients, implementation=how
      )
      return MiddleGradient(dh)
    values = ops.join_heads(*dheads, *angles, implementation=how)
    values = _clip_bwd(self.clip, saved.inside, values)[0]
    return MiddleGradient(gradient_operand(values, recipe), values=values)

  @property
  def _attention(self) -> HeadsAttention:
    return HeadsAttention(ops.AttentionKind(self.causal))

  def _angles(self, positions, head_dim):
    return rotation(positions, head_dim=head_dim, theta=self.heads.theta)


@functools.partial(jax.custom_vjp, nondiff_argnames=("limit",))
def _clip(x, limit):
  return _clip_fwd(x, limit)[0]


def _clip_fwd(x, limit):
  if limit is None:
    return x, None
  # One bit a value; autodiff would keep two BF16 arrays, 6 U for q, k and v.
  inside = jnp.packbits(jnp.abs(x) <= limit, axis=-1)
  return jnp.clip(x, -limit, limit), save_residual("attention", inside)


def _clip_bwd(limit, inside, g):
  if limit is None:
    return (g,)
  passes = jnp.unpackbits(inside, axis=-1, count=g.shape[-1])
  return (jnp.where(passes == 1, g, 0),)


_clip.defvjp(_clip_fwd, _clip_bwd)


def self_attention(
  x: Array,
  weights: BlockWeights,
  positions: Array,
  *,
  kind: ops.NormKind | None,
  eps: float,
  heads: Heads,
  causal: bool = True,
  clip: float | None = None,
  post_norm: ops.NormKind | None = None,
  add_input: bool = True,
  recipe: CoatRecipe,
) -> Array:
  """x + post_norm(attention(heads(norm(x) w_qkv)) w_out).

  Args:
    x: [B, T, D], the residual stream, BF16 (or f32).
    weights: front.w [D, (N + 2 K) H], ordered by key head, see
      `layers.split_heads`; back.w [N H, D].
    positions: int32 [T], for RoPE.
    kind: norm in front, "rms" or "layer"; None for none.
    eps: both norms'.
    heads: N, K and the base of RoPE's frequencies, or None for no RoPE.
    causal: whether a query sees only keys up to its own place.
    clip: largest magnitude of q, k and v, or None.
    post_norm: norm of the second product, "rms" or "layer"; None for none.
    add_input: whether x is added.
    recipe: fused where both `linear` and `nonlinear` are "fp8".

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  if positions.shape != (x.shape[1],):
    raise ValueError(
      "self_attention: needs positions [T], one for each of x [B, T, D], got "
      f"x {x.shape} and positions {positions.shape}"
    )
  return block(
    x,
    weights,
    positions,
    middle=SelfAttention(heads, causal, clip),
    kind=kind,
    eps=eps,
    post_norm=post_norm,
    add_input=add_input,
    recipe=recipe,
  )


class Attention(RecipeModule):
  """Self-attention with its norm, RoPE, grouped key heads and residual add.

  x + post_norm(attention(RoPE(norm(x) w_qkv)) w_out).

  Example usage::

    >>> from coat_jax import recipe
    >>> from coat_jax.layers import Attention
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> attention = Attention(
    ...   64, 4, num_kv_heads=2, recipe=recipe.coat(), rngs=nnx.Rngs(0)
    ... )
    >>> attention(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
    >>> attention.qkv.linear.kernel.shape
    (64, 128)

  Attributes:
    qkv: NormLinear to the columns of q, k and v. They are ordered by key head:
      for each of the K key heads its N / K query heads, its key, its value, so
      that a shard of the columns holds whole groups of heads.
    out: Linear [num_heads * head_dim, features].
    post_norm: RMSNorm or LayerNorm; None without this norm.
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
    rope_theta: float | None = 1e4,
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
      causal: whether a query sees only keys up to its own place.
      rope_theta: base of RoPE's frequencies; None for no RoPE.
      clip_qkv: largest magnitude of q, k and v; None leaves them as they are.
      recipe: what is computed and saved in FP8; None for `recipe.coat()`.
      norm: of the input, "rms" or "layer"; None for none.
      post_norm: of what is added to the input, "rms" or "layer"; None for none.
        OLMo 2 has this norm alone, Gemma 2 and 3 have both.
      epsilon: what norms add to the mean square or the variance.
      use_scale: whether norms have a scale [D].
      scale_plus_one: whether norms multiply by 1 + scale, as in Gemma.
      use_norm_bias: whether norms have a bias [D].
      use_bias: whether both products have biases.
      use_qkv_bias: whether q, k and v have one, [(N + 2 K) H]; None for
        `use_bias`.
      use_out_bias: whether the output projection has one, [D]; None for
        `use_bias`.
      add_input: whether the block adds its input, the residual stream.
      dtype: of input, output and what is not FP8; None for what the input and
        the parameters promote to.
      param_dtype: of the parameters and their gradients.
      rngs: its stream `params` initializes the parameters.
      **options: initializers and metadata of the parameters, see
        `BlockOptions`, of kernels [D, (N + 2 K) H] and [N H, D]; flax's other
        arguments are refused.

    Raises:
      ValueError: num_heads is no multiple of num_kv_heads, or features none of
        num_heads where `head_dim` is None; heads of an odd size; an argument of
        flax's that FP8 attention does not have.
    """
    of = options_by_part(options)
    super().__init__(recipe or recipes.coat(), dtype, of.others)
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
    if self.head_dim % 2:
      raise ValueError(
        "Attention: heads must have an even size, for RoPE rotates pairs, got "
        f"{self.head_dim}; pass an even head_dim, or another num_heads"
      )
    self.num_heads, self.num_kv_heads = num_heads, kv_heads
    self.causal, self.rope_theta = causal, rope_theta
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

  def __call__(
    self,
    x: Array,
    positions: Array | None = None,
    *,
    out_sharding: Sharding = None,
  ) -> Array:
    """Attends within each sequence.

    Args:
      x: [..., T, features].
      positions: int32 [T] for RoPE; None for 0 to T - 1.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., T, features] in `dtype`.
    """
    shape = x.shape
    x = rows_to_batch(self.cast(x, self.out.kernel))
    if positions is None:
      positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    y = self_attention(
      x,
      BlockWeights(
        FrontWeights.of(self.qkv.norm, self.qkv.linear),
        BackWeights.of(self.out, self.post_norm),
      ),
      positions,
      **block_norm_options(self.qkv.norm, self.post_norm),
      heads=Heads(self.num_heads, self.num_kv_heads, self.rope_theta),
      causal=self.causal,
      clip=self.clip_qkv,
      add_input=self.add_input,
      recipe=self.active_recipe,
    )
    return reshard(y.reshape(shape), out_sharding)
