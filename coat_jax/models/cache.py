# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder on the next tokens of several texts, with a KV cache.

A slot of the cache stores the key and value of one token in one layer. Prompts
of different lengths are padded on the left, so that they all end in the same
slot. Tokens never attend to padding. This batch contains a prompt of four
tokens and a prompt of two tokens; the next step writes slot 4:

         slot   0   1   2   3   4   5
  padding 0     a   b   c   d  (e)
  padding 2     -   -   a   b  (c)

A token's position is its slot minus the padding of its row.

The layers run without FP8: an FP8 matmul uses one scale for all its tokens, so
a prompt's result would depend on the other prompts. The axes of a mesh must
have the type Auto.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P

from coat_jax import recipes
from coat_jax.layers import Attention
from coat_jax.layers.module import RecipeModule
from coat_jax.models.decoder import Decoder
from coat_jax.models.layer import TransformerLayer
from coat_jax.models.placing import Placed
from coat_jax.models.vision.tower import VisionTower
from coat_jax.ops import AttentionKind
from coat_jax.ops.attention import einsum_f32, grouped_heads
from coat_jax.ops.heads import split_heads
from coat_jax.ops.rope import rotate, rotation

# Attention scores are computed for this many queries per sequence at a time.
CHUNK = 256
_MASKED = -1e30
# Avoids Pallas kernels, because XLA cannot partition them.
_PLAIN = recipes.bf16(implementation="xla")


class KVCache(NamedTuple):
  """Keys and values of a batch.

  Attributes:
    k, v: one array [B, S, K, H] per layer: S slots, K heads of width H. The
      dtype is the model's. RoPE has been applied to k.
    padding: int32 [B], the number of slots before each prompt's first token.
    filled: int32, the number of slots written so far.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  padding: Array
  filled: Array

  def positions(self, slots: Array) -> Array:
    """Converts slots [T] to the tokens' positions [B, T]; 0 for padding."""
    return jnp.maximum(slots[None] - self.padding[:, None], 0)


def empty_cache(model: Decoder, padding: Array, *, size: int) -> KVCache:
  """Makes a cache with `size` empty slots per row; `padding` is int32 [B]."""
  attention = model.layers.attention
  shape = padding.shape[0], size, attention.num_kv_heads, attention.head_dim
  zeros = (jnp.zeros(shape, model.dtype),) * model.config.num_layers
  return KVCache(zeros, zeros, padding, jnp.int32(0))


def unstacked(model: Decoder) -> list[Any]:
  """Cuts the stacked layers' parameters into one tree per layer.

  A scan over stacked layers would copy each layer's weights, keys and values
  for every token, which would triple the memory traffic of decoding.
  """
  stack = nnx.split(model.layers)[1]
  return [
    jax.tree.map(lambda x: x[i], stack)  # noqa: B023
    for i in range(model.config.num_layers)
  ]


def cached_forward(
  model: Decoder,
  tokens: Array,
  cache: KVCache,
  layers: Sequence[Any] | None = None,
  placed: Placed | None = None,
) -> tuple[Array, KVCache]:
  """Runs a decoder without FP8 on the next tokens of all rows, int32 [B, T].

  T must be at most `CHUNK` or a multiple of `CHUNK`, and at most the number of
  free slots. On a mesh, B must be a multiple of the number of devices over
  which the batch is sharded. `layers` is the result of `unstacked`, which is
  called if `layers` is None.

  Returns hidden states [B, T, D], which are meaningless for padding, and a
  cache that also contains the new tokens.
  """
  axes, model = model.axes, without_fp8(model)
  slots = cache.filled + jnp.arange(tokens.shape[1], dtype=jnp.int32)
  graph = nnx.split(model.layers)[0]
  if layers is None:
    layers = unstacked(model)

  def sharded(x: Array, *others: str | None) -> Array:
    """Shards axis 0 of x over the batch axes, and other axes over `others`."""
    if axes is None:
      return x
    return jax.lax.with_sharding_constraint(x, P(axes.batch, *others))

  x = sharded(model.embed_at(tokens, cache.positions(slots), placed))
  kinds = model.config.kinds_of_layers or (0,) * len(layers)
  stored = []
  for params, kind, *old in zip(layers, kinds, cache.k, cache.v, strict=True):
    layer: TransformerLayer = nnx.merge(graph, params)
    attention = layer.attention
    q, *new = _heads(attention, attention.qkv(x), cache.positions(slots), kind)
    k, v = (
      jax.lax.dynamic_update_slice_in_dim(each, part, slots[0], axis=1)
      for each, part in zip(old, new, strict=True)
    )
    kind = _of_kind(attention.middle.kind, kind)
    y = attention.out(_attend(kind, q, k, v, slots, cache.padding))
    if attention.post_norm is not None:
      y = attention.post_norm(y)
    x = sharded(layer.routed(x + y if attention.add_input else y)[0])
    heads = (None, axes.tensor) if axes else ()
    stored.append((sharded(k, *heads), sharded(v, *heads)))
  k, v = zip(*stored, strict=True)
  filled = cache.filled + tokens.shape[1]
  return model.norm(x), KVCache(k, v, cache.padding, filled)


def without_fp8[Model: nnx.Module](model: Model) -> Model:
  """Copies a model; the copy has the recipe bf16 and no mesh axes."""
  copy = nnx.merge(*nnx.split(model))
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, Decoder | VisionTower):
      part.axes = None
    if isinstance(part, RecipeModule):
      part.recipe = _PLAIN
  return copy


def _of_kind(options: Any, kind: int) -> Any:
  """Returns the option for a kind of layer; a tuple has one entry per kind."""
  return options[kind] if isinstance(options, tuple) else options


def _heads(
  attention: Attention, h: Array, positions: Array, kind: int
) -> tuple[Array, Array, Array]:
  """Computes q [B, T, N, H] and k, v [B, T, K, H] from h, the output of qkv."""
  middle, weights = attention.middle, attention.qk_weights
  if (limit := middle.clip) is not None:
    h = jnp.clip(h, -limit, limit)
  n, kv_heads, theta = middle.heads
  q, k, v = split_heads.definition(
    h, None, None, num_heads=n, num_kv_heads=kv_heads
  )
  if middle.qk_norm is not None and weights is not None:
    q = middle.qk_norm.normalized(q, weights.q)
    k = middle.qk_norm.normalized(k, weights.k)
  if (theta := _of_kind(theta, kind)) is not None:
    cos, sin = rotation(positions, head_dim=attention.head_dim, theta=theta)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
  return q.astype(v.dtype), k.astype(v.dtype), v


def _attend(
  kind: AttentionKind,
  q: Array,
  k: Array,
  v: Array,
  slots: Array,
  padding: Array,
) -> Array:
  """Returns attention's output [B, T, N H] over the slots a query may see."""
  b, t, n, h = q.shape
  key = jnp.arange(k.shape[1])
  is_token = key[None] >= padding[:, None]

  def one_chunk(args):
    q, slots = args
    scores = einsum_f32("btkrh,bskh->bkrts", q, k)
    is_past = key[None] <= slots[:, None]
    if kind.window is not None:
      is_past &= key[None] > slots[:, None] - kind.window
    seen = is_token[:, None] & is_past[None]
    scores = scores * kind.scale_of(h)
    if kind.soft_cap is not None:
      scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    # A query in the padding sees no keys, so -inf would make its softmax NaN.
    scores = jnp.where(seen[:, None, None], scores, _MASKED)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return einsum_f32("bkrts,bskh->btkrh", p, v).astype(q.dtype)

  q = grouped_heads(q, k.shape[2])
  if t <= CHUNK:
    out = one_chunk((q, slots))
  else:
    chunks = jnp.moveaxis(q.reshape(b, -1, CHUNK, *q.shape[2:]), 1, 0)
    out = jax.lax.map(one_chunk, (chunks, slots.reshape(-1, CHUNK)))
    out = jnp.moveaxis(out, 0, 1)
  return out.reshape(b, t, n * h)
