# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and the layout of heads, in plain jnp.

Pairs of channels are (i, i + R/2) of the first R, as in Hugging Face
Transformers; R is a head's size H unless RoPE is partial. The columns of q, k
and v are ordered by key head: for each of the K key heads its N / K query
heads, its key, its value.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.checks import COUNT, check_whole
from coat_jax.formats import E5M2
from coat_jax.ops.dispatch import op
from coat_jax.ops.quantize import quantize_tensor
from coat_jax.ops.rotary import Rotary
from coat_jax.ops.types import Operand

# RoPE's base, or a `Rotary`; None turns nothing.
type Theta = float | Rotary | None
# Where a stack has layers of several kinds, one for each kind.
type Thetas = Theta | tuple[Theta, ...]


def rotation(
  positions: Array, *, head_dim: int, theta: Thetas, kind: Array | None = None
) -> tuple[Array, Array]:
  """cos and sin of position * theta^(-2 i / R): f32 [T, R / 2] each.

  Args:
    positions: int32 [T]; or [B, T], and then the results are [B, T, R / 2].
    head_dim: H, which R is too unless a `Rotary` says otherwise.
    theta: the base, or a `Rotary`; None turns nothing. A tuple has one for each
      kind of layer, all with the same R.
    kind: int32 scalar, the place in that tuple.
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
  """`rotation`; (None, None) where nothing turns in any kind of layer."""
  if theta is None:
    return None, None
  return rotation(positions, head_dim=head_dim, theta=theta, kind=kind)


def _frequencies(theta, head_dim, kind):
  """f32 [R / 2], and what cos and sin are multiplied by, or None."""
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
  """A base as the RoPE that has nothing else."""
  return theta if isinstance(theta, Rotary) else Rotary(theta)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates the pairs of x [B, T, N, H], in f32; the first R channels of H.

  `cos` and `sin` are [T, R / 2] or [B, T, R / 2].
  """
  if cos.ndim == 2:
    # One angle for all sequences and heads.
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
  """Takes q, k and v apart and rotates q and k.

  Args:
    qkv: [B, T, (N + 2 K) H].
    cos, sin: f32 [T, R / 2] or [B, T, R / 2], R at most H: see `rotate`; None
      rotates nothing.
    num_heads, num_kv_heads: N and K.

  Returns:
    q [B, T, N, H] and k, v [B, T, K, H].
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
  """The transpose of `split_heads`, which is linear: [B, T, (N + 2 K) H]."""
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
  dtype: DTypeLike = E5M2,
  has_sums: bool = False,
  axis_names: tuple[str, ...] = (),
) -> tuple[Operand, Array | None]:
  """`join_heads` to the operand of the products before.

  Args:
    dq: [B, T, N, H].
    dk, dv: [B, T, K, H].
    cos, sin: as of `split_heads`.
    dtype: format of the operand.
    has_sums: whether the gradient of a bias is wanted.

  Returns:
    The operand in both layouts; and the sum over tokens of what it stands for,
    before that is rounded to `dtype`, f32 [(N + 2 K) H], or None.
  """
  joined = join_heads.definition(dq, dk, dv, cos, sin)
  sums = None
  if has_sums:
    sums = jnp.sum(joined.astype(jnp.float32), axis=(0, 1))
  operand = quantize_tensor.definition(
    joined, dtype=dtype, layout="both", axis_names=axis_names
  )
  return operand, sums
