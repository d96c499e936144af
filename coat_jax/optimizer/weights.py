# SPDX-License-Identifier: Apache-2.0
"""Weights without a copy in f32: bf16, or bf16 and a byte.

A weight of 24 bits is the upper 24 bits W of an f32, 15 of them its mantissa's.
It is stored as two arrays:

  high = (W + 0x80) >> 8    bf16, the one nearest to W: what layers read
  low  = W - (high << 8)    int8, what an optimizer's step adds to it

Both ways are exact. W itself is rounded, stochastically in a step: 2^-16 of a
weight is the least update that is not left to chance, where bf16 alone has
2^-8. See docs/optimizer.md on which one to take.

`stored_step.step_of` takes either kind in a parameter's place. Its random words
are `stochastic.parameter_words`: bf16 takes their high 16 bits, 24 bits the
high 8.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax import Array, lax
from jaxtyping import Float32, UInt32

from coat_jax import stochastic
from coat_jax.checks import check_function, refuse
from coat_jax.optimizer import moments
from coat_jax.optimizer.masks import QuantizeMask, is_norm_or_bias, leaf_paths

_SIGN = 0x80000000
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
# The bits of the largest f32 whose W has a finite bf16 next to it.
_LARGEST = 0x7F7F7FFF


class SplitWeight(NamedTuple):
  """A leaf of weights of 24 bits.

  Attributes:
    high: bf16 of any shape, nearest to the weight.
    low: int8 of the same shape, the weight less `high`, in 256ths of an ulp of
      it (in front of a power of two, of the smaller one).
  """

  high: Array
  low: Array


# A leaf of parameters as an optimizer's step takes it.
Weight = Array | SplitWeight


def split(
  x: Float32[Array, "*s"], words: UInt32[Array, "*s"] | None = None
) -> SplitWeight:
  """Rounds f32 to 24 bits and splits these.

  Args:
    x: of any shape. Infinities stay, a NaN becomes the canonical one of its
      sign; finite values beyond 3.3895e38, whose nearest bf16 would be
      infinite, become that.
    words: of which the high 8 bits round stochastically, so that
      E[join(split(x))] = x; None to nearest, ties to even.

  Returns:
    A `SplitWeight`.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  sign = bits & jnp.uint32(_SIGN)
  size = bits ^ sign
  if words is None:
    rounding = ((size >> 8) & 1) + jnp.uint32(0x7F)
  else:
    rounding = words >> 24
  kept = jnp.minimum(size + rounding, jnp.uint32(_LARGEST))
  kept = jnp.where(size < _INFINITY, kept, size)
  kept = jnp.where(size > _INFINITY, jnp.uint32(_NAN), kept)
  word = (kept | sign) >> 8
  high = ((word + 0x80) >> 8).astype(jnp.uint16)
  low = (word & 0xFF).astype(jnp.uint8)
  return SplitWeight(
    lax.bitcast_convert_type(high, jnp.bfloat16),
    lax.bitcast_convert_type(low, jnp.int8),
  )


def join(weight: SplitWeight) -> Float32[Array, "*s"]:
  """The f32 that a `SplitWeight` stands for: the inverse of `split`.

  A weight that was set to zero or to an infinity is that, whatever its byte;
  bytes above 0 give a zero less than f32's smallest normal number.
  """
  high, low = weight
  upper = high.astype(jnp.float32)
  bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
  added = lax.bitcast_convert_type(low.astype(jnp.int32) << 8, jnp.uint32)
  x = lax.bitcast_convert_type(bits + added, jnp.float32)
  # Infinity with a byte below 0 has the bits of a large number, and zero those
  # of a NaN.
  x = jnp.where(x == x, x, upper)
  return jnp.where(jnp.abs(upper) < jnp.inf, x, upper)


def in_f32(weight: Weight) -> Array:
  """A leaf in f32, or in complex64 where it is complex."""
  if isinstance(weight, SplitWeight):
    return join(weight)
  return moments.in_f32(weight)


def round_like(
  weight: Weight,
  x: Array,
  key: Array,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> Weight:
  """A leaf x stored as `weight` is: stochastically where it is rounded.

  Args:
    weight: f32 and other dtypes are rounded to nearest.
    x: f32 of its shape; complex64 of a complex one.
    key: from `stochastic.leaf_key`.
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    x as an array of the same dtype or a `SplitWeight`.
  """
  if isinstance(weight, SplitWeight):
    return round_stochastically(split, x, key, start, whole)
  if weight.dtype == jnp.bfloat16:
    to_bfloat16 = stochastic.round_to_bfloat16
    return round_stochastically(to_bfloat16, x, key, start, whole)
  return x.astype(weight.dtype)


@functools.partial(jax.jit, static_argnames=("rounding", "whole"), inline=True)
def round_stochastically(
  rounding: Callable[[Array, Array], Any],
  x: Array,
  key: Array,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> Any:
  """One f32 leaf through `rounding(x, words)`, key from `leaf_key`."""

  def f(x, key):
    words = stochastic.random_words(key, x.shape, start=start, whole=whole)
    return rounding(x, stochastic.parameter_words(words))

  return moments.partitioned_like(x, f)(x, key)


def is_matrix(path: str, leaf: Any) -> bool:
  """Whether a leaf is split unless the user says otherwise.

  Norms' scales and biases are not (`is_norm_or_bias`): they are less than a
  thousandth of a model, and at 1.0, where scales start, bf16 has steps of
  0.8 %.
  """
  return not is_norm_or_bias(path, leaf)


def split_weights(
  params: Any, mask: QuantizeMask | None = None
) -> tuple[Any, Any]:
  """Splits f32 parameters into bf16 ones and a byte each, 24 bits together.

  Args:
    params: tree of parameters.
    mask: `(path, leaf) -> bool`, which f32 leaves are split; None for all but
      norms and biases (`is_norm_or_bias`).

  Returns:
    The parameters, bf16 where they were split, and a tree of bare arrays of
    their structure, int8 of the leaf's shape where a leaf is bf16 (zeros where
    it was before) and an int8 scalar zero where it is not.

  Raises:
    TypeError: a leaf is no array, or `mask` no function.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import join_weights, split_weights
    >>> params, low = split_weights({"w": jnp.full((4, 8), 0.1)})
    >>> print(params["w"].dtype, low["w"].dtype)
    bfloat16 int8
    >>> joined = join_weights(params, low)
    >>> print(f"{params['w'][0, 0]:.6f} {joined['w'][0, 0]:.6f}")
    0.100098 0.100000
  """
  mask = is_matrix if mask is None else mask
  op = "split_weights"
  check_function(op, "mask", mask, "pass (path, leaf) -> bool, or None")
  _check_arrays(op, "params", params)
  high, low = [], []
  for path, leaf in leaf_paths(params):
    part = jnp.zeros([], jnp.int8)
    if leaf.ndim and leaf.dtype == jnp.bfloat16:
      part = jnp.zeros_like(leaf, dtype=jnp.int8)
    elif leaf.ndim and leaf.dtype == jnp.float32 and mask(path, leaf):
      leaf, part = split(leaf)
    high.append(leaf)
    low.append(part)
  bare = jax.tree.structure(nnx.as_pure(meta.unbox(params)))
  return jax.tree.structure(params).unflatten(high), bare.unflatten(low)


def join_weights(params: Any, low: Any) -> Any:
  """The f32 parameters that bf16 ones and their bytes stand for.

  Args:
    params: tree of parameters.
    low: their bytes, as `split_weights` or `LowBitsState` has them.

  Returns:
    `params` with f32 in place of each leaf that has bytes.

  Raises:
    TypeError: a leaf is no array.
    ValueError: they do not belong together.
  """
  pairs = pair_weights("join_weights", params, low)
  joined = [join(x) if isinstance(x, SplitWeight) else x for x in pairs]
  return jax.tree.structure(params).unflatten(joined)


def pair_weights(op: str, params: Any, low: Any) -> list[Weight]:
  """The leaves of `params`, a `SplitWeight` for each that has bytes.

  Args:
    op: the public function that asks, for error messages.
    params: tree of parameters.
    low: their bytes.

  Raises:
    TypeError: a leaf is no array.
    ValueError: they do not belong together.
  """
  _check_arrays(op, "params", params)
  _check_arrays(op, "low", low)
  leaves, parts = leaf_paths(params), jax.tree.leaves(low)
  if len(leaves) != len(parts):
    raise ValueError(
      f"{op}: there must be an array of low bytes for each parameter, got "
      f"{len(parts)} for {len(leaves)}; pass both as split_weights gave them"
    )
  out = []
  for (path, leaf), part in zip(leaves, parts, strict=True):
    if not part.ndim:
      out.append(leaf)
      continue
    if (leaf.dtype, leaf.shape) != (jnp.bfloat16, part.shape):
      raise ValueError(
        f"{op}: a parameter with low bytes {list(part.shape)} must be bfloat16 "
        f"of their shape, got {leaf.dtype}{list(leaf.shape)} at {path!r}; pass "
        "the parameters that split_weights gave"
      )
    out.append(SplitWeight(leaf, part))
  return out


def _check_arrays(op: str, name: str, tree: Any) -> None:
  for path, leaf in leaf_paths(tree):
    if not hasattr(leaf, "dtype"):
      remedy = f"pass one at {path!r} too"
      refuse(TypeError, op, name, "a tree of arrays", leaf, remedy)


def unpair_weights(
  leaves: Sequence[Weight], low: Any
) -> tuple[list[Array], Any]:
  """The inverse of `pair_weights`.

  Args:
    leaves: as it returns them.
    low: the bytes that it was given, whose scalars stay.

  Returns:
    The leaves of the parameters, and the tree of bytes.
  """
  pairs = [
    x if isinstance(x, SplitWeight) else (x, part)
    for x, part in zip(leaves, jax.tree.leaves(low), strict=True)
  ]
  high, parts = [x for x, _ in pairs], [part for _, part in pairs]
  return high, jax.tree.structure(low).unflatten(parts)
