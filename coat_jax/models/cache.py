# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder on the next tokens of several texts, with a KV cache.

Everything runs in the model's `dtype`, BF16 or f32, and never in FP8, whatever
the recipe: an FP8 matmul uses one scale for all its tokens, so a token's result
would depend on the other rows and on how many tokens are computed at once.

A slot of the cache stores the key and value of one token. Prompts of different
lengths are padded on the left, so they all end in the same slot, and each step
writes the same slot in every row. Queries never attend to padding, and a
token's position counts from the first token of its prompt.

         slot   0   1   2   3   4   5            position = slot - padding
  padding 0     a   b   c   d  (e)               padding 2: slots 0 and 1
  padding 2     -   -   a   b  (c)               step 4 writes slot 4

The layers are the model's own modules, in recipe bf16. Only two steps differ:
`_heads` rotates each token by its position in its own row, and `_attend` reads
the cache. On a mesh, XLA partitions everything (automatic axes).
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

# Only the scores of this many queries are in memory at the same time.
CHUNK = 256
_MASKED = -1e30
# No kernels, because XLA cannot partition them.
_PLAIN = recipes.bf16(implementation="xla")


class KVCache(NamedTuple):
  """Keys and values of a batch.

  Attributes:
    k, v: [layers, B, S, K, H], or one [1, B, S, K, H] per layer, in the model's
      dtype. k is rotated.
    padding: int32 [B], the number of slots before each row's first token.
    filled: int32, the number of written slots; also the next token's slot.
  """

  k: Array | tuple[Array, ...]
  v: Array | tuple[Array, ...]
  padding: Array
  filled: Array

  def positions(self, slots: Array) -> Array:
    """Returns slots' positions [B, T], counted from each row's first token."""
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

  In a loop over layers, XLA copies each layer's weights, keys and values out of
  their stacks before every matmul. That triples the memory traffic of decoding,
  which runs each layer once per token, so cut the stacks once, beforehand.
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

  On a mesh, call it in a `jit` under `jax.set_mesh`. B must be a multiple of
  the number of devices that split the batch.

  Args:
    model: a decoder in any recipe.
    tokens: int32 [B, T], where T is at most 256 or a multiple of 256. They fill
      the slots from `cache.filled` on; the cache must have room for them.
    cache: the keys and values of all earlier tokens.
    layers: the `unstacked` parameters of `model.layers`; the cache must then be
      unstacked too. None uses the model's own stack.
    placed: features that replace the embeddings of some tokens.

  Returns:
    Hidden states [B, T, D], which are meaningless for padding, and the cache
    including these tokens.
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
  """Shards [B, ...] by batch, a cache [layers, B, S, K, H] also by heads."""
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
  """Splits h into q [B, T, N, H], k and v [B, T, K, H]; rotates q and k."""
  middle = attention.middle
  if (limit := middle.clip) is not None:
    h = jnp.clip(h, -limit, limit)
  norm, weights, heads = middle.qk_norm, attention.qk_weights, middle.heads
  theta = heads.theta
  if norm is not None:
    heads = heads._replace(theta=None)
  # Each row has its own positions, so rotate all rows as one long sequence.
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
    scores = scores * kind.scale_of(h)
    if kind.soft_cap is not None:
      scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    # Padding queries see no key at all: -inf would make their softmax NaN.
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
  """Returns the kind of attention, and the window (None to see all keys)."""
  kinds = attention.middle.kind
  if not isinstance(kinds, tuple):
    return kinds, kinds.window
  windows = [size if kind.window is None else kind.window for kind in kinds]
  return kinds[0], jnp.asarray(windows, jnp.int32)[layer_kind]
