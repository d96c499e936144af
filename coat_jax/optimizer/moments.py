# SPDX-License-Identifier: Apache-2.0
"""The stored moments of a whole tree: which are encoded, and how.

What is between a codec, which knows one array, and an optimizer's state. Each
moment of a state is three trees of the parameters' structure, its codes and
statistics (`codecs.group.Encoded`): `mu_codes, mu_amax, mu_range` and as many
for every other moment. Here a leaf's moments are a tuple of `Encoded`, of any
length, and their codecs a tuple as long.

A leaf that a codec does not encode is stored in f32, the first moment of a
complex one in complex64, which is inferred from the state's dtypes: those are
its codes'.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax import Array

from coat_jax import stochastic
from coat_jax.codecs.group import Encoded, GroupCodec, Plain
from coat_jax.optimizer.masks import (
  QuantizeMask,
  default_quantize_mask,
  leaf_paths,
)

# The moments of one leaf as they are stored, and the codec of each of them.
Stored = tuple[Encoded, ...]
GroupCodecs = tuple[GroupCodec, ...]

# Holds a `ChosenCodecs` while `sharding` traces an `init`. It is a context of
# JAX's, so that a jitted one is traced again.
NOTES = jax.make_user_context(default_value=None)

_PLAIN = {dtype: Plain(dtype) for dtype in ("float32", "complex64")}


class ChosenCodecs:
  """The codecs that `choose_groups` was given, once each, in `found`."""

  def __init__(self):
    self.found: list[GroupCodecs] = []

  def add(self, groups: GroupCodecs) -> None:
    if groups not in self.found:
      self.found.append(groups)


def choose_groups(
  op: str, params: Any, groups: GroupCodecs, mask: QuantizeMask | None
) -> list[GroupCodecs]:
  """The group codecs of every leaf of `params`, in order.

  Args:
    op: the public function that asks, for error messages.
    params: tree of arrays or `jax.ShapeDtypeStruct`s.
    groups: the codecs of leaves to encode, one a moment.
    mask: which those are; None for `default_quantize_mask`.

  Returns:
    As many codecs a leaf.

  Raises:
    TypeError: a leaf is neither floating nor complex, `mask` chooses a complex
      one, or is no function.
    ValueError: `mask` chooses a scalar.
  """
  mask = default_quantize_mask if mask is None else mask
  if not callable(mask):
    raise TypeError(
      f"{op}: quantize_mask must be a function (path, leaf) -> bool, got "
      f"{mask!r}; for every leaf that can be encoded leave it out"
    )
  if NOTES.value is not None:
    NOTES.value.add(groups)
  out = []
  for path, leaf in leaf_paths(params):
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
      got = type(leaf).__name__ if dtype is None else dtype
      raise TypeError(
        f"{op}: parameters must be floating or complex, got {got} at "
        f"{path!r}; leave it out with optax.masked or optax.partition"
      )
    chosen = mask(path, leaf)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if chosen and is_complex:
      raise TypeError(
        f"{op}: quantize_mask must choose real leaves, got {dtype} at "
        f"{path!r}; return False for it, or wrap the optimizer in "
        "optax.contrib.split_real_and_imaginary"
      )
    if chosen and leaf.ndim == 0:
      raise ValueError(
        f"{op}: quantize_mask must choose arrays with an axis, got the scalar "
        f"at {path!r}; return False for it"
      )
    out.append(groups if chosen else _plain_groups(is_complex, len(groups)))
  return out


def _plain_groups(is_complex: bool, count: int) -> GroupCodecs:
  """Of moments that are not encoded: but for the first they are of squares."""
  first = _PLAIN["complex64" if is_complex else "float32"]
  return (first, *(_PLAIN["float32"],) * (count - 1))


def in_f32(x: Array) -> Array:
  """x in f32, or in complex64 where it is complex."""
  return x.astype("complex64" if jnp.iscomplexobj(x) else "float32")


def stored_groups(
  op: str, stored: Stored, groups: GroupCodecs, name: str
) -> GroupCodecs:
  """The group codecs that wrote the moments of a leaf: `groups`, or f32.

  Args:
    op: the public function that asks, for error messages.
    stored: the moments of one leaf.
    groups: the codecs of leaves that are encoded, one a moment.
    name: what these are called together, for error messages.

  Returns:
    The leaf's codecs.

  Raises:
    ValueError: neither can have written them.
  """
  if not any(is_encoded(encoded) for encoded in stored):
    return tuple(_PLAIN[encoded.codes.dtype.name] for encoded in stored)
  for encoded, group in zip(stored, groups, strict=True):
    got, want = _layout(encoded), _stored_layout(group, encoded.codes.shape)
    if got != want:
      raise ValueError(
        f"{op}: codec {name!r} keeps a moment as {want}, got {got}; pass "
        "the codec that the state was made with (to change it, go through "
        "to_plain_state and from_plain_state)"
      )
  return groups


def is_encoded(encoded: Encoded) -> bool:
  """Whether a codec wrote this moment: False where it is stored as it is."""
  return encoded.codes.dtype.name not in _PLAIN


def _layout(encoded: Encoded) -> str:
  return ", ".join(f"{x.dtype}{list(x.shape)}" for x in encoded)


@functools.lru_cache(maxsize=4096)
def _stored_layout(group: GroupCodec, shape: tuple[int, ...]) -> str:
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  noise = x if group.needs_noise else None
  return _layout(jax.eval_shape(group.encode, x, noise))


def moment_trees(state: Any) -> list[Any]:
  """The trees of the moments that a state stores, as `flatten` takes them.

  They are known by their names: a moment m is stored in m_codes, m_amax and
  m_range, fields of a NamedTuple or of the mapping that NNX makes of one.

  Args:
    state: anything.

  Returns:
    Three trees for each moment, in the order of its fields; [] where `state`
    stores none.
  """
  fields = state._asdict() if hasattr(state, "_asdict") else state
  if not isinstance(fields, Mapping):
    return []
  codes = f"_{Encoded._fields[0]}"
  names = [
    [f"{key.removesuffix(codes)}_{field}" for field in Encoded._fields]
    for key in fields
    if isinstance(key, str) and key.endswith(codes)
  ]
  return [
    fields[name]
    for moment in names
    if all(name in fields for name in moment)
    for name in moment
  ]


def all_moment_trees(tree: Any) -> Iterator[list[Any]]:
  """`moment_trees` of each state in a tree that stores moments."""
  for leaf in jax.tree.leaves(tree, is_leaf=lambda x: bool(moment_trees(x))):
    if found := moment_trees(leaf):
      yield found


def flatten(trees: Sequence[Any]) -> list[Stored]:
  """The moments of every leaf, in order, from three trees for each moment."""
  columns = [jax.tree.leaves(tree) for tree in trees]
  width = len(Encoded._fields)
  return [
    tuple(Encoded(*row[i : i + width]) for i in range(0, len(row), width))
    for row in zip(*columns, strict=True)
  ]


def unflatten(trees: Sequence[Any], stored: Sequence[Stored]) -> list[Any]:
  """Three trees for each moment: the inverse of `flatten`.

  Args:
    trees: whose structures they get.
    stored: the moments of every leaf, in order.

  Returns:
    As many trees.
  """
  rows = [[x for encoded in moments for x in encoded] for moments in stored]
  return [
    jax.tree.structure(tree).unflatten([row[i] for row in rows])
    for i, tree in enumerate(trees)
  ]


def trees_like(params: Any, count: int) -> list[Any]:
  """Trees of the structures that `count` moments of `params` have.

  Boxes around parameters (`nnx.Variable`, Linen's `Partitioned`) stay around
  the codes, which are sharded as they say. Statistics are bare arrays: they
  have other shapes, where the same sharding need not be possible.
  """
  bare = nnx.as_pure(meta.unbox(params))
  return [params, bare, bare] * count


@functools.partial(jax.jit, static_argnames=("groups", "whole"), inline=True)
def encode(
  groups: GroupCodecs,
  values: tuple[Array, ...],
  key: Array,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> Stored:
  """Encodes the moments of one leaf.

  Args:
    groups: the leaf's group codecs.
    values: the moments, f32 of one shape.
    key: from `stochastic.leaf_key`. The first moment takes its words, the
      second those next to them (`stochastic.next_words`); the next two moments
      take those of another key, and so on (`pair_key`).
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    The moments as they are stored.
  """

  def f(values, key):
    noise = _noise(groups, key, values[0].shape, start, whole)
    return tuple(
      group.encode(x, half)
      for group, x, half in zip(groups, values, noise, strict=True)
    )

  return partitioned_like(values[0], f)(values, key)


@functools.partial(jax.jit, static_argnames="groups", inline=True)
def encode_zeros(groups: GroupCodecs, zeros: Array) -> Stored:
  """The moments of one leaf before its first step.

  Zeros are encoded as zeros whatever the noise is, so none is drawn: `init`
  compiles in two thirds of the time.

  Args:
    groups: the leaf's group codecs.
    zeros: f32 of the leaf's shape and sharding.
  """

  def f(zeros):
    noise = jnp.full_like(zeros, 0.5)
    return tuple(
      group.encode(zeros, noise if group.needs_noise else None)
      for group in groups
    )

  return partitioned_like(zeros, f)(zeros)


def _noise(groups: GroupCodecs, key: Array, shape, start, whole) -> list:
  """Uniform noise for each moment whose codec needs any, else None."""
  out = []
  for pair in range(0, len(groups), 2):
    needs = [group.needs_noise for group in groups[pair : pair + 2]]
    if not any(needs):
      out += [None] * len(needs)
      continue
    words = stochastic.random_words(
      pair_key(key, pair // 2), shape, start=start, whole=whole
    )
    both = words, stochastic.next_words(words)
    out += [
      stochastic.uniform(words) if needed else None
      for words, needed in zip(both, needs, strict=False)
    ]
  return out


def pair_key(key: Array, pair: int) -> Array:
  """The key of the words that moments 2 `pair` and 2 `pair` + 1 share.

  That of the first pair is the leaf's own: the words of Adam's two moments.
  """
  if not pair:
    return key
  return stochastic.mix(key ^ jnp.uint32(pair * stochastic.GOLDEN % 2**32))


@functools.partial(jax.jit, static_argnames="groups", inline=True)
def decode(groups: GroupCodecs, stored: Stored) -> tuple[Array, ...]:
  """Decodes the moments of one leaf to f32."""

  def f(stored):
    return tuple(
      group.decode(encoded)
      for group, encoded in zip(groups, stored, strict=True)
    )

  return partitioned_like(stored[0].codes, f)(stored)


def partitioned_like(x: Array, f: Callable) -> Callable:
  """`f` as the compiler partitions it, with results sharded like x.

  Where x is sharded over explicit axes, JAX refuses to reshape a row into
  groups that are split over devices and makes random words whole on each of
  them. The compiler, left to itself, does neither.
  """
  sharding = jax.typeof(x).sharding
  if all(axes is None for axes in sharding.spec):
    return f

  def spec_of(out):
    if not out.ndim:
      return jax.P()
    *rows, last = sharding.spec
    axes = last if isinstance(last, tuple) else (last,) if last else ()
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return jax.P(*rows, last if out.shape[-1] % parts == 0 else None)

  def g(*args):
    whole = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    specs = jax.tree.map(spec_of, jax.eval_shape(f, *whole))
    return jax.sharding.auto_axes(f, out_sharding=specs)(*args)

  return g
