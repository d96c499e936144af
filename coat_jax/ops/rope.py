# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE) and the layout of heads, in plain jnp.

Channels are paired (i, i + R/2) among the first R, as in Hugging Face
Transformers; R is a head's size H unless RoPE is partial. The columns of q, k
and v are ordered by key head: for each of the K key heads, its N / K query
heads, its key, its value.
"""

import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import COUNT, check_whole
from coat_jax.numerics.scaling import GRADIENTS, Operand, Scaling
from coat_jax.ops.dispatch import op
from coat_jax.ops.rotary import Rotary

# RoPE's base or a `Rotary`; None rotates nothing.
type Theta = float | Rotary | None
# In a stack with several kinds of layers, one for each kind.
type Thetas = Theta | tuple[Theta, ...]


def rotation(
  positions: Array, *, head_dim: int, theta: Thetas, kind: Array | None = None
) -> tuple[Array, Array]:
  """Computes cos and sin of position * theta^(-2 i / R): f32 [T, R / 2] each.

  For positions [B, T] the results are [B, T, R / 2]. R is `head_dim` unless a
  `Rotary` says otherwise. A tuple `theta` has one entry for each kind of layer,
  all with the same R; `kind`, an int32 scalar, selects one. None rotates
  nothing.
  """
  if theta is None:
    shape = *positions.shape, head_dim // 2
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
  frequency, magnitude = _frequencies(theta, head_dim, kind)
  positions = positions.astype(jnp.float32)[..., None]
  axes = tuple(range(positions.ndim - 1))
  angle = positions * jnp.expand_dims(frequency, axes)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if magnitude is None:
    return cos, sin
  return cos * magnitude, sin * magnitude


def rotation_if_any(
  positions: Array, *, head_dim: int, theta: Thetas, kind: Array | None = None
) -> tuple[Array | None, Array | None]:
  """Calls `rotation`; (None, None) if no kind of layer rotates."""
  if theta is None:
    return None, None
  return rotation(positions, head_dim=head_dim, theta=theta, kind=kind)


def _frequencies(theta, head_dim, kind):
  """Returns frequencies f32 [R / 2] and the factor of cos and sin, or None."""
  if not isinstance(theta, tuple):
    rotary = as_rotary(theta)
    magnitude = rotary.magnitude
    return rotary.frequencies(head_dim), magnitude if magnitude != 1 else None
  rotaries = [None if x is None else as_rotary(x) for x in theta]
  sizes = {r.rotary_dim or head_dim for r in rotaries if r is not None}
  if len(sizes) > 1:
    raise ValueError(
      "rope: rotary_dim must be the same in all kinds of layers, got "
      f"{sorted(sizes)}; pass one size"
    )
  still = jnp.zeros(max(sizes, default=head_dim) // 2, jnp.float32)
  frequencies = jnp.stack(
    [still if r is None else r.frequencies(head_dim) for r in rotaries]
  )
  magnitudes = [1.0 if r is None else r.magnitude for r in rotaries]
  if set(magnitudes) == {1.0}:
    return frequencies[kind], None
  return frequencies[kind], jnp.asarray(magnitudes, jnp.float32)[kind]


def as_rotary(theta: float | Rotary) -> Rotary:
  """Wraps a base as a `Rotary` without other options."""
  return theta if isinstance(theta, Rotary) else Rotary(theta)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates the first R channels of x [B, T, N, H] in pairs, in f32.

  `cos` and `sin` are [T, R / 2] or [B, T, R / 2].
  """
  if cos.ndim == 2:
    # The same angles for all sequences and heads.
    cos, sin = cos[None, :, None], sin[None, :, None]
  else:
    cos, sin = cos[:, :, None], sin[:, :, None]
  size = 2 * cos.shape[-1]
  is_partial = size < x.shape[-1]
  turning = x[..., :size] if is_partial else x
  a, b = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  rotated = rotated.astype(x.dtype)
  if not is_partial:
    return rotated
  return jnp.concatenate([rotated, x[..., size:]], axis=-1)


def _check_columns(qkv, cos, sin, *, num_heads, num_kv_heads, **kwargs) -> None:
  del cos, sin, kwargs
  remedy = "pass those of the weight"
  check_whole("split_heads", "num_heads", num_heads, COUNT, remedy)
  check_whole("split_heads", "num_kv_heads", num_kv_heads, COUNT, remedy)
  count = num_heads + 2 * num_kv_heads
  if qkv.ndim != 3 or num_heads % num_kv_heads or qkv.shape[-1] % count:
    raise ValueError(
      "split_heads: qkv must be [B, T, (N + 2 K) H] with N a multiple of K, "
      f"got {qkv.shape} with N {num_heads} and K {num_kv_heads}; {remedy}"
    )


@op(check=_check_columns, triton="rope")
def split_heads(
  qkv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  num_heads: int,
  num_kv_heads: int,
) -> tuple[Array, Array, Array]:
  """Splits qkv [B, T, (N + 2 K) H] into q, k and v; rotates q and k.

  cos and sin are as for `rotate`; None rotates nothing. q is [B, T, N, H]; k
  and v are [B, T, K, H].
  """
  b, t, columns = qkv.shape
  h = columns // (num_heads + 2 * num_kv_heads)
  heads = num_heads // num_kv_heads
  qkv = qkv.reshape(b, t, num_kv_heads, heads + 2, h)
  q = qkv[..., :heads, :].reshape(b, t, num_heads, h)
  k, v = qkv[..., heads, :], qkv[..., heads + 1, :]
  if cos is None or sin is None:
    return q, k, v
  return rotate(q, cos, sin), rotate(k, cos, sin), v


@op(triton="rope")
def join_heads(
  dq: Array, dk: Array, dv: Array, cos: Array | None, sin: Array | None
) -> Array:
  """Transposes `split_heads`, which is linear: returns [B, T, (N + 2 K) H]."""
  b, t, kv_heads, h = dk.shape
  heads = dq.shape[2] // kv_heads
  if cos is not None and sin is not None:
    dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
  parts = (
    dq.reshape(b, t, kv_heads, heads, h),
    dk[..., None, :],
    dv[..., None, :],
  )
  columns = kv_heads * (heads + 2) * h
  return jnp.concatenate(parts, axis=3).reshape(b, t, columns)


@op(triton="rope")
def join_heads_operand(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  gradient: Scaling = GRADIENTS,
  has_sums: bool = False,
) -> tuple[Operand, Array | None]:
  """Writes `join_heads` as the operand of the gradients' products.

  Returns it in both layouts; and, with `has_sums`, the gradient summed over
  tokens before it is rounded, f32 [(N + 2 K) H], for a bias.
  """
  joined = join_heads.definition(dq, dk, dv, cos, sin)
  sums = None
  if has_sums:
    sums = jnp.sum(joined.astype(jnp.float32), axis=(0, 1))
  return gradient.quantize(joined, layout="both"), sums
