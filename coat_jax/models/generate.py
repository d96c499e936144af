# SPDX-License-Identifier: Apache-2.0
"""Text out: tokens that a decoder adds to prompts.

Two programs: one runs the prompts and chooses the first new token, the other
adds tokens until all rows have stopped. Both are compiled for sizes that are
rounded up, so that other prompts, lengths, seeds and temperatures find them
compiled.
"""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from coat_jax.checks import COUNT, check_kind, check_whole, refuse
from coat_jax.models.cache import (
  CHUNK,
  KVCache,
  cached_forward,
  empty_cache,
  unstacked,
)
from coat_jax.models.decoder import Decoder
from coat_jax.models.placing import Placed
from coat_jax.models.prompt_images import check_images, place_images
from coat_jax.models.sampling import (
  NO_TOKEN,
  Sampling,
  choose,
  make_sampling,
)
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.optimizer.masks import is_norm_or_bias

_SMALLEST_BUCKET = 16
_READ_IN_F32 = ("router", "position_embedding")


class Generation(NamedTuple):
  """What `generate` returns.

  Attributes:
    tokens: of each prompt the new ones; the last is a stop token where it has
      stopped.
    prefill_s: seconds that the prompts and the first new tokens took.
    decode_s: seconds of all other new tokens. Both have what was compiled.
  """

  tokens: list[list[int]]
  prefill_s: float
  decode_s: float


def generate(
  model: Decoder | VisionLanguageModel,
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int,
  pixel_values: Array | np.ndarray | None = None,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  stop_tokens: Sequence[int] = (),
  seed: int = 0,
  cache_size: int | None = None,
) -> Generation:
  """Adds tokens to prompts, all at once.

  Computed in the model's `dtype`, BF16 or f32, without FP8 in any recipe: an
  FP8 product has one scale for all of its tokens, so that what a prompt gives
  would depend on the prompts beside it. So a prompt gives what it gives alone,
  up to the order of sums.

  While tokens are added there is a copy of the layers' weights in that dtype
  (but of what is read in f32), each layer's by itself, whatever they are stored
  in.

  On a mesh it is called under `jax.set_mesh`, with the model's parameters
  sharded; the axes are those of the model's recipe.

  Args:
    model: a Decoder, or a VisionLanguageModel.
    prompts: token ids, of several lengths.
    max_new_tokens: how many to add to each, unless it stops before.
    pixel_values: [B, I, C, H, W], the images of each prompt as
      `VisionLanguageModel` takes them, which has all image tokens of each; None
      for text alone.
    temperature: what logits are divided by; 0 takes the most probable token.
    top_k: draws from the k most probable tokens; None from all.
    top_p: draws from the fewest most probable tokens whose probability reaches
      this, after `top_k`; None from all.
    stop_tokens: a row stops after one of them.
    seed: of what is drawn. A row's draws depend on its place, not on how many
      prompts there are.
    cache_size: tokens of a row that there is memory for, padding included; one
      size for all calls compiles the second program once. None for the longest
      prompt and `max_new_tokens`, each rounded up.

  Returns:
    A `Generation`.

  Raises:
    TypeError: an argument of another kind, such as a token that is no whole
      number.
    ValueError: no prompt, an empty one, a token outside the vocabulary, more
      tokens than the model has learned positions for, other images than image
      tokens, an option outside its range, or a model that computes NaN.

  Examples:
    >>> from coat_jax import recipe
    >>> from coat_jax.models import Decoder, ModelConfig, generate
    >>> from flax import nnx
    >>> config = ModelConfig(
    ...   family="llama", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...   num_kv_heads=2, vocab_size=384,
    ... )
    >>> model = Decoder(config, recipe.coat(), rngs=nnx.Rngs(0))
    >>> found = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> [len(tokens) for tokens in found.tokens]
    [5, 5]
  """
  op, kinds = "generate", (Decoder, VisionLanguageModel)
  check_kind(op, "model", model, kinds, "a tower alone generates no tokens")
  sampling = make_sampling(temperature, top_k, top_p)
  decoder = model.decoder if isinstance(model, VisionLanguageModel) else model
  _check(decoder, prompts, max_new_tokens, stop_tokens, seed)
  if pixel_values is not None:
    check_images(model, prompts, pixel_values)
  length = bucket(max(map(len, prompts)))
  if cache_size is not None:
    check_whole(op, "cache_size", cache_size, None, "pass None")
  else:
    cache_size = length + bucket(max_new_tokens)
  if cache_size < length + max_new_tokens:
    raise ValueError(
      "generate: cache_size must hold the longest prompt, rounded up, and the "
      f"new tokens, {length} + {max_new_tokens}, got {cache_size}; pass more, "
      "or None"
    )
  tokens, padding = _padded(prompts, length, rows=_rows(decoder, len(prompts)))
  is_row = np.arange(len(tokens)) < len(prompts)
  graph, params = nnx.split(decoder)
  keys = _keys(seed, len(tokens))

  started, placed = time.monotonic(), None
  if pixel_values is not None and isinstance(model, VisionLanguageModel):
    placed = place_images(model, tokens, padding, pixel_values)
  first, cache = _prefill(
    graph, params, tokens, padding, sampling, keys, placed, size=cache_size
  )
  jax.block_until_ready(first)
  prefilled = time.monotonic()
  stops = np.array(sorted({NO_TOKEN, *stop_tokens}), np.int32)
  new, count, _ = _decode(
    graph, params, first, cache, sampling, keys, is_row, stops, max_new_tokens
  )
  new = np.asarray(new)[: len(prompts), : int(count)]
  ended = time.monotonic()
  found = [_until_stop(row.tolist(), stop_tokens) for row in new]
  for i, row in enumerate(found):
    if NO_TOKEN in row:
      raise ValueError(
        "generate: logits must be finite, got NaN or infinity for token "
        f"{row.index(NO_TOKEN) + 1} after prompt {i}; the model's weights hold "
        "NaN or infinity, or its activations overflow: use an earlier "
        "checkpoint, or activations in f32"
      )
  return Generation(
    tokens=found,
    prefill_s=prefilled - started,
    decode_s=ended - prefilled,
  )


def bucket(size: int) -> int:
  """A size rounded up: to a power of two, or to a multiple of 256.

  Args:
    size: tokens of the longest prompt, or new ones; at least 1.

  Returns:
    At least 16.
  """
  if size > CHUNK:
    return -(-size // CHUNK) * CHUNK
  return max(1 << (size - 1).bit_length(), _SMALLEST_BUCKET)


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def _prefill(
  graph: Any,
  params: Any,
  tokens: Array,
  padding: Array,
  sampling: Sampling,
  keys: Array,
  placed: Placed | None,
  *,
  size: int,
) -> tuple[Array, KVCache]:
  """The first new token of each row, int32 [B], and the cache in parts."""
  model = nnx.merge(graph, params)
  cache = empty_cache(model, padding, size=size)
  hidden, cache = cached_forward(model, tokens, cache, placed=placed)
  logits = model.logits_of_hidden(hidden[:, -1:])[:, 0]
  k, v = (unstacked(x, model.config.num_layers) for x in (cache.k, cache.v))
  cache = cache._replace(k=k, v=v)
  return choose(logits, sampling, _keys_of(keys, 0)), cache


@functools.partial(
  jax.jit, static_argnames=("graph",), donate_argnames=("cache",)
)
def _decode(
  graph: Any,
  params: Any,
  first: Array,
  cache: KVCache,
  sampling: Sampling,
  keys: Array,
  is_row: Array,
  stops: Array,
  most: Array | int,
) -> tuple[Array, Array, KVCache]:
  """New tokens int32 [B, room], how many of them are, and the cache.

  Args:
    graph, params: the model.
    first: int32 [B], the first new token.
    cache: of what is before it, in parts.
    sampling, keys: as in `choose`.
    is_row: bool [B], False for rows that nobody waits for.
    stops: int32 [n], stop tokens.
    most: new tokens, the first included.
  """
  params = _in_dtype(graph, params)
  room = cache.k[0].shape[2]
  _, stack = nnx.split(nnx.merge(graph, params).layers)
  layers = unstacked(stack, len(cache.k))
  new = jnp.zeros((first.shape[0], room), jnp.int32)
  is_running = is_row & ~_is_stop(first, stops)
  state = jnp.int32(1), first, new.at[:, 0].set(first), is_running, cache

  def goes_on(state):
    count, _, _, is_running, _ = state
    return (count < most) & jnp.any(is_running)

  def add(state):
    count, last, new, is_running, cache = state
    model = nnx.merge(graph, params)
    hidden, cache = cached_forward(model, last[:, None], cache, layers)
    logits = model.logits_of_hidden(hidden)[:, 0]
    last = choose(logits, sampling, _keys_of(keys, count))
    new = new.at[:, count].set(last)
    is_running = is_running & ~_is_stop(last, stops)
    return count + 1, last, new, is_running, cache

  count, _, new, _, cache = jax.lax.while_loop(goes_on, add, state)
  return new, count, cache


def _in_dtype(graph: Any, params: Any) -> Any:
  """Weights as the model reads them: cast once, not in each step.

  What it reads in f32 stays: norms, biases, learned positions, and routers,
  whose rounding would send tokens to other experts than in training.
  """
  dtype = nnx.merge(graph, params).dtype

  def cast(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    name = name.removesuffix("/value")
    is_wider = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > (
      jnp.dtype(dtype).itemsize
    )
    is_kept = is_norm_or_bias(name, x) or name.split("/")[-1] in _READ_IN_F32
    return x.astype(dtype) if is_wider and not is_kept else x

  return jax.tree.map_with_path(cast, params)


def _keys(seed: int, rows: int) -> Array:
  """A key for each row."""
  key = jax.random.key(seed)
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def _keys_of(keys: Array, count: Array | int) -> Array:
  """Keys of the token after `count` new ones."""
  return jax.vmap(lambda key: jax.random.fold_in(key, count))(keys)


def _is_stop(token: Array, stops: Array) -> Array:
  return jnp.any(token[:, None] == stops[None], axis=-1)


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
  """Tokens up to the first stop token, it included."""
  ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
  return tokens[: ends[0]] if ends else tokens


def _rows(model: Decoder, count: int) -> int:
  """How many rows a batch has: on a mesh as many on each device."""
  if (axes := model.axes) is None:
    return count
  shape = jax.sharding.get_abstract_mesh().shape
  if missing := [name for name in axes.tokens if name not in shape]:
    raise ValueError(
      f"generate: the model's recipe names the axis {missing[0]!r} of a mesh, "
      f"got {tuple(shape) or 'no mesh'}; call it under jax.set_mesh of a mesh "
      "with these axes, or make the model without axes"
    )
  devices = math.prod(shape[name] for name in axes.batch)
  return -(-count // devices) * devices


def _padded(
  prompts: Sequence[Sequence[int]], length: int, *, rows: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens int32 [rows, length], padded on the left, and padding [rows]."""
  tokens = np.zeros((rows, length), np.int32)
  padding = np.full(rows, length - 1, np.int32)
  for i, prompt in enumerate(prompts):
    padding[i] = length - len(prompt)
    tokens[i, padding[i] :] = prompt
  return tokens, padding


def _ids(name: str, tokens: Any) -> np.ndarray:
  """Token ids [n]; a TypeError for what is none."""
  try:
    found = np.asarray(tokens)
  except (TypeError, ValueError):  # Of several lengths.
    found = np.asarray("")
  if found.ndim != 1 or found.size and found.dtype.kind not in "iu":
    remedy = "use the model's own tokenizer"
    refuse(TypeError, "generate", name, "token ids", tokens, remedy)
  return found


def _check(
  model: Decoder,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  stop_tokens: Sequence[int],
  seed: int,
) -> None:
  """Raises where arguments are not as `generate` needs them."""
  op = "generate"
  if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
    remedy = "pass a list of token ids for each"
    refuse(TypeError, op, "prompts", "several prompts", prompts, remedy)
  if not len(prompts):
    raise ValueError("generate: needs at least one prompt, got none; pass one")
  vocab_size = model.embedding.shape[0]
  for i, prompt in enumerate(prompts):
    tokens = _ids(f"prompt {i}", prompt)
    if not tokens.size:
      raise ValueError(
        "generate: a prompt must have at least one token, got none in prompt "
        f"{i}; pass a token that texts begin with"
      )
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
      raise ValueError(
        "generate: tokens must be at least 0 and below the vocabulary of "
        f"{vocab_size}, got {tokens.min()} to {tokens.max()} in prompt {i}; "
        "use the model's own tokenizer"
      )
  stops = _ids("stop_tokens", stop_tokens)
  if stops.size and not 0 <= stops.min() <= stops.max() < vocab_size:
    raise ValueError(
      "generate: stop_tokens must be at least 0 and below the vocabulary of "
      f"{vocab_size}, got {tuple(stop_tokens)}; use the model's own"
    )
  remedy = "pass how many tokens to add"
  check_whole(op, "max_new_tokens", max_new_tokens, COUNT, remedy)
  # The last new token is not read.
  longest = max(map(len, prompts))
  model.config.check_length(
    f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones",
    longest + max_new_tokens - 1,
  )
  check_whole(op, "seed", seed, None, "pass another")
  if not 0 <= seed < 2**32:
    raise ValueError(
      f"generate: seed must be at least 0 and below 2^32, got {seed}; pass "
      "another"
    )
