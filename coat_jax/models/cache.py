# SPDX-License-Identifier: Apache-2.0
"""The forward of a decoder that keeps keys and values: one block after another.

Computed in the model's `dtype`, BF16 or f32, without FP8 whatever the recipe:
an FP8 product has one scale for all of its tokens, so that what a token gives
would depend on the tokens beside it, and on how many come at once.

Prompts of several lengths share a cache by padding on the left: all end in one
slot, and a step writes one slot of all rows. Padding has a slot but no query
sees it; positions are counted from a prompt's first token.

         slot   0   1   2   3   4   5            position = slot - padding
  padding 0     a   b   c   d  (e)               padding 2: slots 0 and 1
  padding 2     -   -   a   b  (c)               step 4 writes slot 4

Layers are the model's own modules, in recipe bf16. What is different with a
cache is here: `_heads`, of which tokens q, k and v are rotated, and `_attend`,
which keys a query sees. XLA partitions all of it on a mesh (automatic axes).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P

from coat_jax import recipe as recipes
from coat_jax.layers import Attention, Heads, split_heads
from coat_jax.layers.module import RecipeModule
from coat_jax.models.decoder import Decoder, DecoderLayer
from coat_jax.ops.rope import rotate, rotation
from coat_jax.recipe import MeshAxes

# Of queries, whose scores against all slots are held at a time.
CHUNK = 256
_MASKED = -1e30
# Without kernels, which XLA cannot partition.
_PLAIN = recipes.bf16(implementation="xla")


class KVCache(NamedTuple):
  """Keys and values of a batch.

  Attributes:
    k, v: [layers, B, S, K, H] in the model's dtype; k is rotated.
    padding: int32 [B], slots in front of each row's first token.
    filled: int32, slots that are written; the next token's.
  """

  k: Array
  v: Array
  padding: Array
  filled: Array


def empty_cache(model: Decoder, padding: Array, *, size: int) -> KVCache:
  """A cache without tokens.

  Args:
    model: a Decoder.
    padding: int32 [B], how many tokens of the first block are padding.
    size: S, tokens and padding of a row that it has room for.

  Returns:
    A `KVCache` of zeros.
  """
  attention = model.layers.attention
  num_layers = attention.out.kernel.shape[0]
  kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
  shape = (num_layers, padding.shape[0], size, kv_heads, head_dim)
  zeros = jnp.zeros(shape, model.dtype)
  return KVCache(zeros, zeros, padding, jnp.int32(0))


def cached_forward(
  model: Decoder, tokens: Array, cache: KVCache
) -> tuple[Array, KVCache]:
  """Runs the next tokens of all rows.

  Args:
    model: a Decoder, in any recipe. On a mesh this is called in a `jit` under
      `jax.set_mesh`, B a multiple of the devices that sequences are split over.
    tokens: int32 [B, T], for slots `cache.filled` to `cache.filled + T - 1`,
      which the cache must have room for; T up to 256, or a multiple of it.
    cache: of the tokens before.

  Returns:
    Hidden states [B, T, D] of the model's dtype, those of the model without a
    cache; of padding they mean nothing. And the cache with these tokens.
  """
  axes, model = model.axes, _without_fp8(model)
  slots = cache.filled + jnp.arange(tokens.shape[1], dtype=jnp.int32)
  graph, layers = nnx.split(model.layers)

  def run(carry, params):
    x, i, k, v = carry
    layer: DecoderLayer = nnx.merge(graph, params)
    x, k, v = _attention(layer.attention, x, i, slots, cache._replace(k=k, v=v))
    x = _sharded(layer.mlp(x), axes)
    k, v = (_sharded(each, axes, is_cache=True) for each in (k, v))
    return (x, i + 1, k, v), None

  x = _sharded(model.embed(tokens), axes)
  start = x, jnp.int32(0), cache.k, cache.v
  (x, _, k, v), _ = jax.lax.scan(run, start, layers)
  filled = cache.filled + tokens.shape[1]
  return model.norm(x), KVCache(k, v, cache.padding, filled)


def _without_fp8(model: Decoder) -> Decoder:
  """A copy of the same weights in recipe bf16, which XLA partitions."""
  copy = nnx.merge(*nnx.split(model))
  copy.axes = None
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, RecipeModule):
      part.recipe = _PLAIN
  return copy


def _sharded(
  x: Array, axes: MeshAxes | None, *, is_cache: bool = False
) -> Array:
  """[B, ...], or a cache [layers, B, S, K, H], with the batch split."""
  if axes is None:
    return x
  spec = P(None, axes.batch, None, axes.tensor) if is_cache else P(axes.batch)
  return jax.lax.with_sharding_constraint(x, spec)


def _attention(
  attention: Attention, x: Array, layer: Array, slots: Array, cache: KVCache
) -> tuple[Array, Array, Array]:
  """The attention block of one layer; k and v of all layers with its own."""
  positions = jnp.maximum(slots[None] - cache.padding[:, None], 0)
  q, *new = _heads(attention, attention.qkv(x), positions)
  zero = jnp.int32(0)
  start = layer, zero, slots[0], zero, zero
  k, v = (
    jax.lax.dynamic_update_slice(old, each[None], start)
    for old, each in zip((cache.k, cache.v), new, strict=True)
  )
  out = _attend(attention, q, k[layer], v[layer], slots, cache.padding)
  y = attention.out(out)
  if attention.post_norm is not None:
    y = attention.post_norm(y)
  return x + y if attention.add_input else y, k, v


def _heads(
  attention: Attention, h: Array, positions: Array
) -> tuple[Array, Array, Array]:
  """q [B, T, N, H], k and v [B, T, K, H] of h [B, T, (N + 2 K) H], rotated.

  Args:
    attention: whose product h is.
    h: q, k and v.
    positions: int32 [B, T].
  """
  if (limit := attention.clip_qkv) is not None:
    h = jnp.clip(h, -limit, limit)
  norm, weights = attention.norm_of_qk
  heads = Heads(
    attention.num_heads,
    attention.num_kv_heads,
    attention.rotary if norm is None else None,
  )
  # As one sequence, for rows have positions of their own.
  b, t, columns = h.shape
  parts: Any = split_heads(
    h.reshape(1, b * t, columns), positions.reshape(-1), heads, recipe=_PLAIN
  )
  q, k, v = (each.reshape(b, t, *each.shape[2:]) for each in parts)
  if norm is None or weights is None:
    return q, k, v
  cos, sin = rotation(
    positions, head_dim=attention.head_dim, theta=attention.rotary
  )
  q, k = (
    rotate(norm.normalized(x, weight), cos, sin).astype(v.dtype)
    for x, weight in ((q, weights.q), (k, weights.k))
  )
  return q, k, v


def _attend(
  attention: Attention,
  q: Array,
  k: Array,
  v: Array,
  slots: Array,
  padding: Array,
) -> Array:
  """softmax(scores) v, with all slots of the cache as keys.

  Args:
    attention: says which keys a query sees, and how scores are formed.
    q: [B, T, N, H], of the queries at `slots`.
    k, v: [B, S, K, H].
    slots: int32 [T].
    padding: int32 [B].

  Returns:
    [B, T, N H] in q's dtype.
  """
  b, t, n, h = q.shape
  kv_heads = k.shape[2]
  kind: Any = attention.kind  # One: layers of several cannot be cached yet.
  key = jnp.arange(k.shape[1])
  is_token = key[None] >= padding[:, None]

  def one_chunk(args):
    q, slots = args
    scores = jnp.einsum(
      "btkrh,bskh->bkrts", q, k, preferred_element_type=jnp.float32
    )
    is_past = key[None] <= slots[:, None]
    if kind.window is not None:
      is_past &= key[None] > slots[:, None] - kind.window
    seen = is_token[:, None] & is_past[None]
    # Padding sees nothing; finite numbers keep NaN out of its rows.
    scores = scores * kind.scale_of(h)
    if kind.soft_cap is not None:
      scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    scores = jnp.where(seen[:, None, None], scores, _MASKED)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(
      "bkrts,bskh->btkrh", p, v, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype)

  q = q.reshape(b, t, kv_heads, n // kv_heads, h)
  if t <= CHUNK:
    out = one_chunk((q, slots))
  else:
    chunks = jnp.moveaxis(q.reshape(b, -1, CHUNK, *q.shape[2:]), 1, 0)
    out = jax.lax.map(one_chunk, (chunks, slots.reshape(-1, CHUNK)))
    out = jnp.moveaxis(out, 0, 1)
  return out.reshape(b, t, n * h)
