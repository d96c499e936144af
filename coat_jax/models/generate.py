# SPDX-License-Identifier: Apache-2.0
"""Generates text: adds tokens to prompts.

`_prefill` runs the model on the prompts and chooses the first new token of each
prompt. `_decode` adds tokens until all texts have ended. Lengths are rounded up
so that most calls reuse both compiled programs.
"""

import functools
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
from coat_jax.models.prompts import (
  check_ids,
  check_images,
  check_prompts,
  padded,
  place_images,
)
from coat_jax.models.sampling import NO_TOKEN, Sampling, choose, make_sampling
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.numerics.checks import COUNT, Range, check_kind, check_whole
from coat_jax.optimizer.masks import leaf_path

_SMALLEST_BUCKET = 16
_READ_IN_F32 = ("norm", "bias", "router", "positions")


class _Options(NamedTuple):
  """Options for choosing new tokens, and for ending the rows of a batch.

  A row, which is a prompt and its new tokens, ends after one of `stops`,
  int32 [n], or after `most` new tokens. `keys` has one PRNG key per row.
  `is_row` is False for rows that only pad the batch.
  """

  sampling: Sampling
  keys: Array
  is_row: Array | np.ndarray
  stops: Array | np.ndarray
  most: Array | int

  def choose(self, logits: Array, count: Array | int) -> Array:
    """Chooses each row's next token, int32 [B], after `count` new tokens."""
    fold = jax.vmap(lambda key: jax.random.fold_in(key, count))
    return choose(logits, self.sampling, fold(self.keys))

  def goes_on(self, token: Array) -> Array:
    """Returns whether each row continues after its newest token, `token`."""
    is_stop = jnp.any(token[:, None] == self.stops[None], axis=-1)
    return jnp.asarray(self.is_row) & ~is_stop


class Generation(NamedTuple):
  """The result of `generate`.

  Attributes:
    tokens: the new tokens for each prompt, including the stop token if one was
      chosen.
    prefill_s: seconds spent on the prompts and the first new token of each.
    decode_s: seconds spent on all other new tokens. Both times include
      compilation.
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
  """Adds tokens to several prompts at once.

  The model runs in its `dtype` and never in FP8, whatever the recipe: an FP8
  matmul uses one scale for all its tokens, so a prompt's result would depend on
  the other prompts. Without FP8, a prompt's result is the same as if it were
  the only prompt, up to the order of summation.

  During decoding, memory holds a second copy of the layers' weights. If weights
  have a wider dtype than the model's `dtype`, they are cast in this copy,
  except norms, biases and routers. A token embedding or head in a wider dtype
  is copied and cast too.

  On a mesh with automatic axes, shard the parameters, and call `generate` under
  `jax.set_mesh`. The model's recipe determines which mesh axes are used.

  Args:
    model: a Decoder, or a VisionLanguageModel.
    prompts: token ids, of any lengths.
    max_new_tokens: how many tokens to add to each prompt, unless a stop token
      comes earlier.
    pixel_values: [B, I, C, H, W], the images of each prompt, as for
      `VisionLanguageModel`. A prompt must contain the image tokens of
      all its images. None for text alone.
    temperature: divides the logits; 0 chooses the most probable token.
    top_k: draws from the k most probable tokens; None for all.
    top_p: draws from the smallest set of most probable tokens whose
      probabilities, normalized after `top_k`, add up to at least `top_p`; None
      for all.
    stop_tokens: a prompt gets no more tokens after any of these.
    seed: seed of the random draws. A prompt's draws depend on its index, but
      not on the number of prompts.
    cache_size: number of tokens per prompt, including padding, that the KV
      cache can hold. None for the longest prompt plus `max_new_tokens`, each
      rounded up. Decoding is compiled again if the cache size, the number of
      prompts, the number of stop tokens or the set of sampling options in use
      changes.

  Returns:
    A `Generation`.

  Raises:
    TypeError: an argument has the wrong type, such as a token that is not a
      whole number.
    ValueError: there is no prompt, a prompt is empty, a token is outside the
      vocabulary, there are more tokens than learned positions, images do not
      match the image tokens, an option is outside its range, or logits are NaN
      or infinite.

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
  check_kind(op, "model", model, kinds, "pass a model that reads tokens")
  sampling = make_sampling(temperature, top_k, top_p)
  decoder = model.decoder if isinstance(model, VisionLanguageModel) else model
  check_prompts(decoder, prompts)
  check_ids("stop_tokens", stop_tokens, decoder)
  remedy = "pass how many tokens to add"
  check_whole(op, "max_new_tokens", max_new_tokens, COUNT, remedy)
  longest = max(map(len, prompts))
  decoder.config.check_length(
    f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones",
    longest + max_new_tokens - 1,  # The model never reads the last new token.
  )
  check_whole(op, "seed", seed, Range(0, 2**32 - 1), "pass another seed")
  if pixel_values is not None:
    check_images(model, prompts, pixel_values)
  length = bucket(longest)
  if cache_size is None:
    cache_size = length + bucket(max_new_tokens)
  allowed = Range(length + max_new_tokens, COUNT.highest)
  remedy = "the longest prompt, rounded up, and the new tokens must fit"
  check_whole(op, "cache_size", cache_size, allowed, remedy)
  tokens, padding = padded(prompts, length, decoder)
  stops = np.array(sorted({NO_TOKEN, *stop_tokens}), np.int32)
  is_row = np.arange(len(tokens)) < len(prompts)
  options = _Options(
    sampling, _keys(seed, len(tokens)), is_row, stops, max_new_tokens
  )
  graph, params = nnx.split(decoder)

  started, placed = time.monotonic(), None
  if pixel_values is not None and isinstance(model, VisionLanguageModel):
    placed = place_images(model, tokens, pixel_values)
  first, cache = _prefill(
    graph, params, tokens, padding, options, placed, size=cache_size
  )
  jax.block_until_ready(first)
  prefilled = time.monotonic()
  new, count, _ = _decode(graph, params, first, cache, options)
  new = np.asarray(new)[: len(prompts), : int(count)]
  ended = time.monotonic()
  found = [_until_stop(row.tolist(), stop_tokens) for row in new]
  for i, row in enumerate(found):
    if NO_TOKEN in row:
      raise ValueError(
        "generate: logits must be finite, got NaN or infinity for token "
        f"{row.index(NO_TOKEN) + 1} after prompt {i}; the model's weights or "
        "activations are not finite: use an earlier checkpoint, or another "
        "dtype if the model's dtype is float16"
      )
  return Generation(
    tokens=found,
    prefill_s=prefilled - started,
    decode_s=ended - prefilled,
  )


def bucket(size: int) -> int:
  """Rounds a size up to 16, 32, 64, 128 or a multiple of 256."""
  if size > CHUNK:
    return -(-size // CHUNK) * CHUNK
  return max(1 << (size - 1).bit_length(), _SMALLEST_BUCKET)


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def _prefill(
  graph: Any,
  params: Any,
  tokens: Array,
  padding: Array,
  options: _Options,
  placed: Placed | None,
  *,
  size: int,
) -> tuple[Array, KVCache]:
  """Returns each row's first new token int32 [B], and the cache."""
  model = nnx.merge(graph, params)
  cache = empty_cache(model, padding, size=size)
  hidden, cache = cached_forward(model, tokens, cache, placed=placed)
  logits = model.logits_of_hidden(hidden[:, -1:])[:, 0]
  return options.choose(logits, 0), cache


@functools.partial(
  jax.jit, static_argnames=("graph",), donate_argnames=("cache",)
)
def _decode(
  graph: Any,
  params: Any,
  first: Array,
  cache: KVCache,
  options: _Options,
) -> tuple[Array, Array, KVCache]:
  """Returns new tokens [B, S], how many columns are used, and the cache.

  S is the number of slots in the cache. Column 0 of the tokens is `first`.
  """
  params = _in_dtype(graph, params)
  room = cache.k[0].shape[1]
  layers = unstacked(nnx.merge(graph, params))
  new = jnp.zeros((first.shape[0], room), jnp.int32)
  is_running = options.goes_on(first)
  state = jnp.int32(1), first, new.at[:, 0].set(first), is_running, cache

  def goes_on(state):
    count, _, _, is_running, _ = state
    return (count < options.most) & jnp.any(is_running)

  def add(state):
    count, last, new, is_running, cache = state
    model = nnx.merge(graph, params)
    hidden, cache = cached_forward(model, last[:, None], cache, layers)
    logits = model.logits_of_hidden(hidden)[:, 0]
    last = options.choose(logits, count)
    new = new.at[:, count].set(last)
    is_running = is_running & options.goes_on(last)
    return count + 1, last, new, is_running, cache

  count, _, new, _, cache = jax.lax.while_loop(goes_on, add, state)
  return new, count, cache


def _in_dtype(graph: Any, params: Any) -> Any:
  """Casts weights in wider dtypes to the model's, except `_READ_IN_F32`.

  A rounded router, for example, would send some tokens to different experts.
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
  """Derives a key for each row from the seed."""
  key = jax.random.key(seed)
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
  """Drops the tokens after the first stop token."""
  ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
  return tokens[: ends[0]] if ends else tokens
