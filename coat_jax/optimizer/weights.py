# SPDX-License-Identifier: Apache-2.0
"""Trains bf16 weights without an f32 copy, optionally with 8 more bits each.

A 24-bit weight W is the upper 24 bits of an f32: sign, exponent and 15 mantissa
bits. It is stored in two arrays, and can be split and joined exactly:

  high = (W + 0x80) >> 8    the nearest bf16; layers read only this array
  low  = W - (high << 8)    int8; only the optimizer's step reads this array

An optimizer step computes the new weight in f32 and rounds it to 24 bits
stochastically. Updates below 2^-16 of a weight (with bf16 alone, below 2^-8)
therefore take effect only on average.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float32, UInt32

from coat_jax import mesh
from coat_jax.numerics import stochastic
from coat_jax.numerics.checks import refuse
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import boxes
from coat_jax.optimizer.arguments import check_hyperparameters
from coat_jax.optimizer.masks import is_norm_or_bias, leaf_paths

_SIGN = 0x80000000
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
# The bits of the largest f32 for which `high` is finite.
_LARGEST = 0x7F7F7FFF


class SplitWeight(NamedTuple):
  """A leaf of 24-bit weights.

  Attributes:
    high: bf16 of any shape, nearest to the weight.
    low: int8 of the same shape: |weight| - |high|, in units of 1/256 ulp of
      `high`. If |high| is a power of two and |weight| is smaller, the unit is
      half as large.
  """

  high: Array
  low: Array


# A leaf of the parameters, as optimizer steps accept it.
Weight = Array | SplitWeight


def split(
  x: Float32[Array, "*s"], words: UInt32[Array, "*s"] | None = None
) -> SplitWeight:
  """Rounds f32 of any shape to 24 bits, and splits these into bf16 and a byte.

  With `words`, rounding is stochastic: the mean of join(split(x)) is x.
  Otherwise, x is rounded to nearest, ties to even. A NaN becomes the canonical
  NaN of its sign. Finite magnitudes above 3.3961e38, whose nearest bf16 would
  be infinite, become 3.3961e38.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  sign = bits & jnp.uint32(_SIGN)
  size = bits ^ sign
  if words is None:
    rounding = ((size >> 8) & 1) + jnp.uint32(0x7F)
  else:
    rounding = words >> 24
  # TPUs have no minimum of unsigned integers, so make them signed. Only the
  # bits of a NaN can overflow, and these are replaced below.
  kept = lax.bitcast_convert_type(size + rounding, jnp.int32)
  kept = jnp.minimum(kept, jnp.int32(_LARGEST)).astype(jnp.uint32)
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
  """Inverts `split`: returns the f32 values that a `SplitWeight` represents."""
  high, low = weight
  upper = high.astype(jnp.float32)
  bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
  added = lax.bitcast_convert_type(low.astype(jnp.int32) << 8, jnp.uint32)
  x = lax.bitcast_convert_type(bits + added, jnp.float32)
  # A negative `low` would turn an infinity into a large finite number, and zero
  # into a NaN.
  x = jnp.where(x == x, x, upper)
  return jnp.where(jnp.abs(upper) < jnp.inf, x, upper)


def in_f32(weight: Weight) -> Array:
  """Returns a leaf in f32, or in complex64 if it is complex."""
  if isinstance(weight, SplitWeight):
    return join(weight)
  is_complex = jnp.iscomplexobj(weight)
  return weight.astype("complex64" if is_complex else "float32")


def round_like(
  weight: Weight,
  x: Array,
  part: LeafPart,
  arrange: Callable[[Array], Array] = lambda words: words,
) -> Weight:
  """Rounds x to the format of `weight`, stochastically for bf16 and 24 bits.

  If x was reshaped, `arrange` reshapes the random words in the same way.
  """
  if isinstance(weight, SplitWeight):
    return _rounded(split, x, part, weight.high.shape, arrange)
  if weight.dtype != jnp.bfloat16:
    return x.astype(weight.dtype)
  rounding = stochastic.round_to_bfloat16
  return _rounded(rounding, x, part, weight.shape, arrange)


@functools.partial(
  jax.jit, static_argnames=("rounding", "shape", "arrange"), inline=True
)
def _rounded(rounding, x, part, shape, arrange):
  """Rounds an f32 leaf of this shape by `rounding(x, words)`."""

  def f(x, part):
    words = stochastic.parameter_words(part.words(shape))
    return rounding(x, arrange(words))

  return mesh.run_whole(f, x, part, out_specs=mesh.spec_of(x))


def add_update(weight: Weight, update: Array, key: Array) -> Weight:
  """Adds an update in f32; rounds the sum with the random words of `key`."""
  total = in_f32(weight) + update.astype(jnp.float32)
  return round_like(weight, total, LeafPart(key))


def split_weights(params: Any) -> tuple[Any, Any]:
  """Splits f32 parameters into bf16 and a byte each: 24 bits in total.

  Args:
    params: tree of parameters. All f32 leaves are split, except norms and
      biases (`is_norm_or_bias`).

  Returns:
    Two trees, `high` and `low`, with the structure of `params`. Both keep Flax
    boxes that hold names of axes. `high` contains the parameters, with split
    leaves in bf16. For each bf16 leaf of `high`, `low` contains an int8 array
    of the same shape (zeros if the parameter already was bf16). For all other
    leaves, `low` contains an int8 scalar zero.

  Raises:
    TypeError: a leaf is not an array.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax.optimizer import join_weights, split_weights
    >>> params, low = split_weights({"w": jnp.full((4, 8), 0.1)})
    >>> print(params["w"].dtype, low["w"].dtype)
    bfloat16 int8
    >>> joined = join_weights(params, low)
    >>> print(f"{params['w'][0, 0]:.6f} {joined['w'][0, 0]:.6f}")
    0.100098 0.100000
  """
  _check_arrays("split_weights", "params", params)
  high, low = [], []
  for path, leaf in leaf_paths(params):
    part = jnp.zeros([], jnp.int8)
    is_f32 = leaf.dtype == jnp.float32
    if leaf.ndim and leaf.dtype == jnp.bfloat16:
      part = jnp.zeros_like(leaf, dtype=jnp.int8)
    # Norms stay in f32: near 1.0, where their scales start, bf16 values are
    # 0.8 % apart.
    elif leaf.ndim and is_f32 and not is_norm_or_bias(path, leaf):
      leaf, part = split(leaf)
    high.append(leaf)
    low.append(part)
  boxed = boxes.box_like(params, low, boxes.mesh_of(params))
  return jax.tree.structure(params).unflatten(high), boxed


def join_weights(params: Any, low: Any) -> Any:
  """Joins bf16 parameters and their low bytes to f32; inverts `split_weights`.

  Args:
    params: tree of parameters.
    low: their low bytes, from `split_weights` or a `LowBitsState`.

  Returns:
    `params` with f32 instead of bf16 for each leaf that has low bytes.

  Raises:
    TypeError: a leaf is not an array.
    ValueError: `low` does not belong to `params`.
  """
  pairs = pair_weights("join_weights", params, low)
  joined = [join(x) if isinstance(x, SplitWeight) else x for x in pairs]
  return jax.tree.structure(params).unflatten(joined)


def pair_weights(op: str, params: Any, low: Any) -> list[Weight]:
  """Lists the parameters, each as a `SplitWeight` if it has low bytes."""
  _check_arrays(op, "params", params)
  _check_arrays(op, "low", low)
  leaves, parts = leaf_paths(params), jax.tree.leaves(low)
  if len(leaves) != len(parts):
    raise ValueError(
      f"{op}: there must be an array of low bytes for each parameter, got "
      f"{len(parts)} for {len(leaves)}; pass both trees of split_weights"
    )
  out = []
  for (path, leaf), part in zip(leaves, parts, strict=True):
    if not part.ndim:
      out.append(leaf)
      continue
    if (leaf.dtype, leaf.shape) != (jnp.bfloat16, part.shape):
      raise ValueError(
        f"{op}: a parameter whose low bytes have shape {list(part.shape)} must "
        f"be a bfloat16 array of this shape, got {leaf.dtype}"
        f"{list(leaf.shape)} at {path!r}; pass the parameters that "
        "split_weights returned"
      )
    out.append(SplitWeight(leaf, part))
  return out


def _check_arrays(op: str, name: str, tree: Any) -> None:
  for path, leaf in leaf_paths(tree):
    if not hasattr(leaf, "dtype"):
      remedy = f"pass an array at {path!r}"
      refuse(TypeError, op, name, "a tree of arrays", leaf, remedy)


def unpair_weights(
  leaves: Sequence[Weight], low: Any
) -> tuple[list[Array], Any]:
  """Inverts `pair_weights`: returns a list of parameters and the tree `low`."""
  pairs = [
    x if isinstance(x, SplitWeight) else (x, part)
    for x, part in zip(leaves, jax.tree.leaves(low), strict=True)
  ]
  high, parts = [x for x, _ in pairs], [part for _, part in pairs]
  return high, jax.tree.structure(low).unflatten(parts)


class StochasticRoundingState(NamedTuple):
  """State of `stochastic_rounding`.

  Attributes:
    count: int32 [], number of updates so far.
    low: the low bytes that `split_weights` returns; () without `low_bits`.
  """

  count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
  low: Any


def stochastic_rounding(
  seed: ArrayLike = 0, *, low_bits: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Changes updates so that `optax.apply_updates` rounds bf16 stochastically.

  Use this as the last transformation of a chain. Without `low_bits`, the update
  d of a bf16 weight p becomes round(p + d) - p in f32, where round is
  stochastic and has the expected value p + d. `optax.apply_updates` then
  computes round(p + d) exactly if this value is within a factor of 2^16 of p.
  With the same seed and step, `coat_jax.apply_updates` returns the same
  weights, bit for bit. Updates of weights of other dtypes do not change.

  Do not wrap this transformation in `optax.apply_if_finite`, which requires
  updates in the gradients' dtype. Wrap only the optimizer before it.

  Args:
    seed: seed of the random words.
    low_bits: whether the state stores one more byte for each bf16 weight, which
      extends it to 24 bits: see `split_weights`.

  Returns:
    An `optax.GradientTransformationExtraArgs`; its `update` requires `params`.

  Raises:
    TypeError: `seed` is not a whole number.
    ValueError: `update` is called without `params`.

  Examples:
    >>> import jax.numpy as jnp, optax
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import stochastic_rounding
    >>> optimizer = optax.chain(coat_adamw(1e-4), stochastic_rounding())
    >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    >>> state, start = optimizer.init(params), params
    >>> for _ in range(10):
    ...   updates, state = optimizer.update(start, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> print(f"{params['w'].astype('float32').mean():.4f}")
    0.9990
  """
  op = "stochastic_rounding"
  check_hyperparameters(op, seed=seed)

  def init_fn(params: optax.Params) -> StochasticRoundingState:
    low = split_weights(params)[1] if low_bits else ()
    return StochasticRoundingState(jnp.zeros([], jnp.int32), low)

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    if params is None:
      raise ValueError(
        f"{op}: update requires the parameters, got params=None; pass "
        "update(updates, state, params)"
      )
    count = optax.safe_increment(state.count)
    weights, treedef = jax.tree.flatten(params)
    if low_bits:
      weights = pair_weights(op, params, state.low)
    changes = treedef.flatten_up_to(updates)
    for i, (weight, change) in enumerate(zip(weights, changes, strict=True)):
      old = weight.high if isinstance(weight, SplitWeight) else weight
      if change is None or old.dtype != jnp.bfloat16:
        continue
      key = stochastic.leaf_key(seed, count, i)
      weights[i] = add_update(weight, change, key)
      new = jax.tree.leaves(weights[i])[0]
      changes[i] = new.astype(jnp.float32) - old.astype(jnp.float32)
    low = unpair_weights(weights, state.low)[1] if low_bits else ()
    state = StochasticRoundingState(jnp.asarray(count), low)
    return treedef.unflatten(changes), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
