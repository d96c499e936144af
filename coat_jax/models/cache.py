# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder on the next tokens of several texts, with a KV cache.

Computed in the model's `dtype`, BF16 or f32, without FP8 whatever the recipe:
an FP8 product has one scale for all of its tokens, so a token's result would
depend on the tokens of other rows, and on how many are computed at once.

Prompts of several lengths share a cache by padding on the left: all end in one
slot, and a step writes one slot of all rows. Padding has slots that no query
sees; positions are counted from a prompt's first token.

         slot   0   1   2   3   4   5            position = slot - padding
  padding 0     a   b   c   d  (e)               padding 2: slots 0 and 1
  padding 2     -   -   a   b  (c)               step 4 writes slot 4

Layers are the model's own modules, in recipe bf16. Two functions differ from
theirs: `_heads` rotates tokens at their positions, and `_attend` reads the
cache. XLA partitions all of it on a mesh (automatic axes).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P

from coat_jax.layers import Attention, split_heads
from coat_jax.layers.module import RecipeModule
from coat_jax.models.decoder import Decoder, DecoderLayer
from coat_jax.models.placing import Placed
from coat_jax.models.vision.tower import VisionTower
from coat_jax.numerics import recipes
from coat_jax.numerics.recipes import MeshAxes
from coat_jax.ops import AttentionKind
from coat_jax.ops.rope import rotate, rotation

# Scores of this many queries against all slots exist at a time.
CHUNK = 256
_MASKED = -1e30
# Without kernels, which XLA cannot partition.
_PLAIN = recipes.bf16(implementation="xla")


class KVCache(NamedTuple):
  """Keys and values of a batch.

  Attributes:
    k, v: [layers, B, S, K, H] in the model's dtype; k is rotated. Or a tuple
      of [1, B, S, K, H], one for each layer.
    padding: int32 [B], the number of slots before each row's first token.
    filled: int32, the number of written slots, and the slot of the next token.
  """

  k: Array | tuple[Array, ...]
  v: Array | tuple[Array, ...]
  padding: Array
  filled: Array

  def positions(self, slots: Array) -> Array:
    """Counts the positions [B, T] of slots from each row's first token."""
    return jnp.maximum(slots[None] - self.padding[:, None], 0)


def empty_cache(model: Decoder, padding: Array, *, size: int) -> KVCache:
  """Makes a cache of `size` empty slots for rows with padding int32 [B]."""
  attention = model.layers.attention
  num_layers = attention.out.kernel.shape[0]
  kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
  shape = (num_layers, padding.shape[0], size, kv_heads, head_dim)
  zeros = jnp.zeros(shape, model.dtype)
  return KVCache(zeros, zeros, padding, jnp.int32(0))


def unstacked(stack: Any, num_layers: int) -> tuple:
  """Cuts a tree of stacked layers into one tree per layer, [1, ...] each.

  In a loop over layers XLA copies a layer's weights, keys and values out of
  their stacks before each product: three times the memory traffic if a layer
  runs once per token. Therefore they are cut once.
  """
  return tuple(
    jax.tree.map(lambda x: x[i : i + 1], stack)  # noqa: B023
    for i in range(num_layers)
  )


def cached_forward(
  model: Decoder,
  tokens: Array,
  cache: KVCache,
  layers: Sequence[Any] | None = None,
  placed: Placed | None = None,
) -> tuple[Array, KVCache]:
  """Runs the next tokens of all rows, without FP8.

  On a mesh it must run in a `jit` under `jax.set_mesh`, with B a multiple of
  the devices that sequences are split over.

  Args:
    model: in any recipe.
    tokens: int32 [B, T], T up to 256 or a multiple of it. They get the slots
      from `cache.filled` on, for which the cache must have room.
    cache: holds the tokens before.
    layers: the parameters of `model.layers`, `unstacked`, with a cache that is
      unstacked too; None for the model's own stack.
    placed: features that replace some tokens.

  Returns:
    Hidden states [B, T, D] (those of padding mean nothing), and the cache with
    these tokens.
  """
  axes, model = model.axes, without_fp8(model)
  slots = cache.filled + jnp.arange(tokens.shape[1], dtype=jnp.int32)
  graph, stack = nnx.split(model.layers)

  def run(carry, params_and_kind):
    x, i, k, v = carry
    params, kind = params_and_kind
    layer: DecoderLayer = nnx.merge(graph, params)
    x, k, v = _attention(
      layer.attention, x, i, kind, slots, cache._replace(k=k, v=v)
    )
    x = _sharded(layer.routed(x)[0], axes)
    k, v = (_sharded(each, axes, is_cache=True) for each in (k, v))
    return (x, i + 1, k, v), None

  x = model.embed_at(tokens, cache.positions(slots), placed)
  x = _sharded(x, axes)
  kinds = model.kinds_of_layers
  if layers is None:
    start = x, jnp.int32(0), cache.k, cache.v
    (x, _, k, v), _ = jax.lax.scan(run, start, (stack, kinds))
  else:
    stored = []
    for i, (params, k, v) in enumerate(
      zip(layers, cache.k, cache.v, strict=True)
    ):
      one = jax.tree.map(lambda w: w[0], params)
      kind = None if kinds is None else kinds[i]
      (x, _, k, v), _ = run((x, jnp.int32(0), k, v), (one, kind))
      stored.append((k, v))
    k, v = zip(*stored, strict=True)
  filled = cache.filled + tokens.shape[1]
  return model.norm(x), KVCache(k, v, cache.padding, filled)


def without_fp8[Model: nnx.Module](model: Model) -> Model:
  """Copies a model or layer with the same weights in recipe bf16."""
  copy = nnx.merge(*nnx.split(model))
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, Decoder | VisionTower):
      part.axes = None
    if isinstance(part, RecipeModule):
      part.recipe = _PLAIN
  return copy


def _sharded(
  x: Array, axes: MeshAxes | None, *, is_cache: bool = False
) -> Array:
  """Shards [B, ...], or a cache [layers, B, S, K, H], by the batch."""
  if axes is None:
    return x
  spec = P(None, axes.batch, None, axes.tensor) if is_cache else P(axes.batch)
  return jax.lax.with_sharding_constraint(x, spec)


def _attention(
  attention: Attention,
  x: Array,
  layer: Array,
  kind: Array | None,
  slots: Array,
  cache: KVCache,
) -> tuple[Array, Array, Array]:
  """Runs a layer's attention block; also returns the cache's new k and v."""
  places = cache.positions(slots)
  q, *new = _heads(attention, attention.qkv(x), places, kind)
  zero = jnp.int32(0)
  start = layer, zero, slots[0], zero, zero
  stored: Any = cache.k, cache.v
  k, v = (
    jax.lax.dynamic_update_slice(old, each[None], start)
    for old, each in zip(stored, new, strict=True)
  )
  out = _attend(attention, q, k[layer], v[layer], slots, cache.padding, kind)
  y = attention.out(out)
  if attention.post_norm is not None:
    y = attention.post_norm(y)
  return x + y if attention.add_input else y, k, v


def _heads(
  attention: Attention, h: Array, positions: Array, kind: Array | None
) -> tuple[Array, Array, Array]:
  """Returns rotated q [B, T, N, H] and k, and v [B, T, K, H], of qkv h."""
  middle = attention.middle
  if (limit := middle.clip) is not None:
    h = jnp.clip(h, -limit, limit)
  norm, weights, heads = middle.qk_norm, attention.qk_weights, middle.heads
  theta = heads.theta
  if norm is not None:
    heads = heads._replace(theta=None)
  # Rows have their own positions, so they are rotated as one sequence.
  b, t, columns = h.shape
  parts: Any = split_heads(
    h.reshape(1, b * t, columns),
    positions.reshape(-1),
    heads,
    kind=kind,
    recipe=_PLAIN,
  )
  q, k, v = (each.reshape(b, t, *each.shape[2:]) for each in parts)
  if norm is None or weights is None:
    return q, k, v
  cos, sin = rotation(
    positions,
    head_dim=attention.head_dim,
    theta=theta,
    kind=kind,
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
  layer_kind: Array | None,
) -> Array:
  """Returns softmax(scores) v [B, T, N H] over all slots of the cache."""
  b, t, n, h = q.shape
  kv_heads = k.shape[2]
  kind, window = _seen(attention, layer_kind, k.shape[1])
  key = jnp.arange(k.shape[1])
  is_token = key[None] >= padding[:, None]

  def one_chunk(args):
    q, slots = args
    scores = jnp.einsum(
      "btkrh,bskh->bkrts", q, k, preferred_element_type=jnp.float32
    )
    is_past = key[None] <= slots[:, None]
    if window is not None:
      is_past &= key[None] > slots[:, None] - window
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


def _seen(
  attention: Attention, layer_kind: Array | None, size: int
) -> tuple[AttentionKind, Array | int | None]:
  """Returns how scores are formed, and how many keys a query sees or None."""
  kinds = attention.middle.kind
  if not isinstance(kinds, tuple):
    return kinds, kinds.window
  windows = [size if kind.window is None else kind.window for kind in kinds]
  return kinds[0], jnp.asarray(windows, jnp.int32)[layer_kind]
