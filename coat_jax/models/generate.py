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

from coat_jax.models.cache import (
  CHUNK,
  KVCache,
  cached_forward,
  empty_cache,
  unstacked,
)
from coat_jax.models.decoder import Decoder
from coat_jax.models.params import parameter
from coat_jax.models.placing import Placed
from coat_jax.models.prompt_images import check_images, place_images
from coat_jax.models.sampling import (
  NO_TOKEN,
  Sampling,
  choose,
  make_sampling,
)
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.numerics.checks import COUNT, check_kind, check_whole, refuse
from coat_jax.optimizer.masks import leaf_path

_SMALLEST_BUCKET = 16
_READ_IN_F32 = ("norm", "bias", "router", "positions")


class _Draws(NamedTuple):
  """How tokens are chosen, and a key for each row."""

  sampling: Sampling
  keys: Array

  def choose(self, logits: Array, count: Array | int) -> Array:
    """Chooses the token int32 [B] after `count` new ones."""
    fold = jax.vmap(lambda key: jax.random.fold_in(key, count))
    return choose(logits, self.sampling, fold(self.keys))


class _Until(NamedTuple):
  """When rows end: after a stop token int32 [n], or `most` new tokens.

  `is_row` [B] is False for rows that nobody waits for.
  """

  is_row: Array | np.ndarray
  stops: Array | np.ndarray
  most: Array | int

  def goes_on(self, token: Array) -> Array:
    """Whether each row continues after its last token."""
    is_stop = jnp.any(token[:, None] == self.stops[None], axis=-1)
    return jnp.asarray(self.is_row) & ~is_stop


class Generation(NamedTuple):
  """The result of `generate`.

  Attributes:
    tokens: the new tokens of each prompt. If a prompt was stopped, its last
      token is the stop token.
    prefill_s: seconds for the prompts and the first new tokens.
    decode_s: seconds for all other new tokens. Both include compiling.
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
    >>> from coat_jax import recipes
    >>> from coat_jax.models import Decoder, ModelConfig, generate
    >>> from flax import nnx
    >>> config = ModelConfig(
    ...   family="llama", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...   num_kv_heads=2, vocab_size=384,
    ... )
    >>> model = Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
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
  stops = np.array(sorted({NO_TOKEN, *stop_tokens}), np.int32)
  is_row = np.arange(len(tokens)) < len(prompts)
  until = _Until(is_row, stops, max_new_tokens)
  graph, params = nnx.split(decoder)
  draws = _Draws(sampling, _keys(seed, len(tokens)))

  started, placed = time.monotonic(), None
  if pixel_values is not None and isinstance(model, VisionLanguageModel):
    placed = place_images(model, tokens, padding, pixel_values)
  first, cache = _prefill(
    graph, params, tokens, padding, draws, placed, size=cache_size
  )
  jax.block_until_ready(first)
  prefilled = time.monotonic()
  new, count, _ = _decode(graph, params, first, cache, draws, until)
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
  """Rounds a size up to a power of two from 16, or a multiple of 256."""
  if size > CHUNK:
    return -(-size // CHUNK) * CHUNK
  return max(1 << (size - 1).bit_length(), _SMALLEST_BUCKET)


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def _prefill(
  graph: Any,
  params: Any,
  tokens: Array,
  padding: Array,
  draws: _Draws,
  placed: Placed | None,
  *,
  size: int,
) -> tuple[Array, KVCache]:
  """Returns each row's first new token int32 [B], and the cache in parts."""
  model = nnx.merge(graph, params)
  cache = empty_cache(model, padding, size=size)
  hidden, cache = cached_forward(model, tokens, cache, placed=placed)
  logits = model.logits_of_hidden(hidden[:, -1:])[:, 0]
  k, v = (unstacked(x, model.config.num_layers) for x in (cache.k, cache.v))
  cache = cache._replace(k=k, v=v)
  return draws.choose(logits, 0), cache


@functools.partial(
  jax.jit, static_argnames=("graph",), donate_argnames=("cache",)
)
def _decode(
  graph: Any,
  params: Any,
  first: Array,
  cache: KVCache,
  draws: _Draws,
  until: _Until,
) -> tuple[Array, Array, KVCache]:
  """Returns new tokens int32 [B, room], how many they are, and the cache.

  `first` is each row's first new token, `cache` holds what is before it.
  """
  params = _in_dtype(graph, params)
  room = cache.k[0].shape[2]
  _, stack = nnx.split(nnx.merge(graph, params).layers)
  layers = unstacked(stack, len(cache.k))
  new = jnp.zeros((first.shape[0], room), jnp.int32)
  is_running = until.goes_on(first)
  state = jnp.int32(1), first, new.at[:, 0].set(first), is_running, cache

  def goes_on(state):
    count, _, _, is_running, _ = state
    return (count < until.most) & jnp.any(is_running)

  def add(state):
    count, last, new, is_running, cache = state
    model = nnx.merge(graph, params)
    hidden, cache = cached_forward(model, last[:, None], cache, layers)
    logits = model.logits_of_hidden(hidden)[:, 0]
    last = draws.choose(logits, count)
    new = new.at[:, count].set(last)
    is_running = is_running & until.goes_on(last)
    return count + 1, last, new, is_running, cache

  count, _, new, _, cache = jax.lax.while_loop(goes_on, add, state)
  return new, count, cache


def _in_dtype(graph: Any, params: Any) -> Any:
  """Casts weights to what the model reads them in, once, not in each step.

  Routers stay in f32: rounding them would send tokens to other experts.
  """
  dtype = nnx.merge(graph, params).dtype

  def cast(path, x):
    is_wider = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > (
      jnp.dtype(dtype).itemsize
    )
    is_kept = parameter(leaf_path(path)).role in _READ_IN_F32
    return x.astype(dtype) if is_wider and not is_kept else x

  return jax.tree.map_with_path(cast, params)


def _keys(seed: int, rows: int) -> Array:
  """Draws a key for each row."""
  key = jax.random.key(seed)
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
  """Cuts tokens after the first stop token."""
  ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
  return tokens[: ends[0]] if ends else tokens


def _rows(model: Decoder, count: int) -> int:
  """Rounds the number of rows up to a multiple of the mesh's devices."""
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
  """Pads prompts on the left: tokens int32 [rows, length], padding [rows]."""
  tokens = np.zeros((rows, length), np.int32)
  padding = np.full(rows, length - 1, np.int32)
  for i, prompt in enumerate(prompts):
    padding[i] = length - len(prompt)
    tokens[i, padding[i] :] = prompt
  return tokens, padding


def _ids(name: str, tokens: Any) -> np.ndarray:
  """Returns token ids [n]; raises TypeError for anything else."""
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
  """Raises an error unless arguments are as `generate` needs them."""
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
