# SPDX-License-Identifier: Apache-2.0
"""Random words (uint32) for stochastic rounding.

The generator is stateless: the words of an element depend only on (seed, step,
leaf, row, column). So a resumed run draws the same words. Row and column are
*global* indices, so words do not depend on the sharding. Row and column are
hashed separately, because a stacked leaf can have more than 2^32 elements.

The hash is xorshift-multiply ("lowbias32" of C. Wellons' hash-prospector
search), which takes 8 integer operations; Threefry takes about 37 per word.
Eight neighboring columns share a hash. With c = column modulo 8, an element has
these words:

  first moment    hash * MULTIPLIER^c
  second moment   hash * MULTIPLIER^(c + 8)
  parameter       hash * MULTIPLIER^(c + 16)

Over the steps, each word is uniform, and any two words are uncorrelated. Use
the high bits of a word, because multiplying hardly changes the low bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, UInt32

# 2^32 divided by the golden ratio, rounded to an odd number. It spreads
# consecutive rows, columns and steps far apart before they are mixed.
GOLDEN = 0x9E3779B9
# The number of neighboring columns that share a hash.
RUN = 8
# A multiplier by Steele and Vigna ("Computationally easy, spectrally good
# multipliers", arXiv:2001.05304).
MULTIPLIER = 0x915F77F5


def mix(word: Array) -> Array:
  """Mixes uint32 words bijectively; each input bit affects all output bits."""
  word = word ^ (word >> 16)
  word = word * jnp.uint32(0x7FEB352D)
  word = word ^ (word >> 15)
  word = word * jnp.uint32(0x846CA68B)
  return word ^ (word >> 16)


def leaf_key(seed: ArrayLike, step: ArrayLike, leaf: ArrayLike) -> Array:
  """Returns the key of a leaf's words at one step: uint32 [].

  `step` is the number of updates of the leaf so far, and `leaf` its index in
  the flattened tree.
  """
  key = jnp.uint32(0)
  for part in (seed, step, leaf):
    key = mix((key + _word(part)) * jnp.uint32(GOLDEN) + jnp.uint32(1))
  return key


def random_words(
  key: Array,
  shape: tuple[int, ...],
  *,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> UInt32[Array, "..."]:
  """Returns one random 32-bit word per element: uint32 `shape`.

  The index along the last axis is the column; all other indices, combined in
  row-major order, are the row. To draw the words for a part of an array, pass
  the indices of the part's first element as `start`, uint32 [axes], and the
  shape of the whole array as `whole`.
  """
  if not shape:
    return random_words(key, (1,))[0]
  whole = shape if whole is None else whole
  *indices, column = (
    jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    + (jnp.uint32(0) if start is None else start[axis])
    for axis in range(len(shape))
  )
  row = jnp.zeros(shape, jnp.uint32)
  for index, size in zip(indices, whole[:-1], strict=True):
    row = row * jnp.uint32(size) + index  # Modulo 2^32.
  return words_at(key, row, column)


def words_at(key: Array, row: Array, column: Array) -> Array:
  """Returns the words at global rows and columns of a leaf, all uint32.

  `row` may have length 1 along the column axis; each row is then hashed only
  once.
  """
  row_word = mix(row * jnp.uint32(GOLDEN) + key)
  word = mix((column // RUN) * jnp.uint32(GOLDEN) + row_word)
  return times_power(word, column)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeafPart:
  """Identifies the part of a leaf that is updated, to draw its random words.

  Attributes:
    key: uint32 [], from `leaf_key`.
    start: uint32 [axes], indices of the part's first element; None for zeros.
    whole: shape of the leaf; None for the shape of the part.
    layer: int32 [], the index of the updated layer in a stacked leaf
      [layers, ...]; None for the whole leaf.
  """

  key: Any  # Any instead of Array, because JAX also puts specs here.
  start: Any = None
  whole: tuple[int, ...] | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  layer: Any = None

  def words(self, shape: tuple[int, ...]) -> Array:
    """Returns `random_words` for an array of this shape."""
    return random_words(self.key, shape, start=self.start, whole=self.whole)


def times_power(word: Array, column: Array) -> Array:
  """Returns word * MULTIPLIER^(column modulo RUN), all uint32."""
  # In a kernel, each register's column modulo RUN, and so its power of
  # MULTIPLIER, is a compile-time constant.
  for bit in range(RUN.bit_length() - 1):
    factor = jnp.uint32(pow(MULTIPLIER, 1 << bit, 2**32))
    word = word * jnp.where((column >> bit) & 1 == 1, factor, jnp.uint32(1))
  return word


def _word(x: ArrayLike) -> Array:
  """Reduces an integer modulo 2^32; jnp rejects Python ints beyond int32."""
  if isinstance(x, int):
    x = jnp.uint32(x & 0xFFFFFFFF)
  return jnp.asarray(x).astype(jnp.uint32)


def next_words(words: Array, count: int = 1) -> Array:
  """Returns the `count`-th set of words after these, uncorrelated with them."""
  return words * jnp.uint32(pow(MULTIPLIER, RUN * count, 2**32))


def parameter_words(words: Array) -> Array:
  """Returns the parameter's words, which follow those of both moments."""
  return next_words(words, 2)


def uniform(words: Array) -> Array:
  """Returns the high 23 bits as f32 in [0, 1), in multiples of 2^-23."""
  # The probability that the result is less than p is p, rounded up to a
  # multiple of 2^-23.
  return (words >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)


def round_to_bfloat16(x: Float[Array, "*s"], words: Array) -> Array:
  """Rounds f32 up or down to bfloat16 at random, so that E[result] = x.

  `words` is uint32 of x's shape; only the high 16 bits are used. NaN,
  infinities and values that bfloat16 represents exactly do not change.
  """
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  # bfloat16 is the upper half of an f32. Adding a random number to the lower
  # half carries into the upper half with probability (lower half) / 2^16.
  noisy = bits + (words >> 16)
  kept = jnp.where(jnp.isfinite(x), noisy, bits) & jnp.uint32(0xFFFF0000)
  # A NaN whose payload is in the lower half would otherwise become an infinity.
  kept = jnp.where(jnp.isnan(x), bits | jnp.uint32(0x00400000), kept)
  return jax.lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)
