# SPDX-License-Identifier: Apache-2.0
"""The moments of a whole tree at rest: which leaves are encoded, and where.

What lies between a codec, which knows one array, and an optimizer's state,
which is six trees: `mu_codes, mu_amax, mu_range, nu_codes, nu_amax, nu_range`.
A leaf that a codec does not encode rests in f32, and the state itself says
which: its codes are f32 then.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax import Array

from coat_jax import stochastic
from coat_jax.codecs import MomentCodec
from coat_jax.codecs.group import Encoded, GroupCodec, Plain

QuantizeMask = Callable[[str, Any], bool]

_SMALLEST_LEAF, _SHORTEST_ROW = 4096, 16


class Groups(NamedTuple):
  """The group codecs of one leaf: static, so a `jit` can be told them."""

  mu: GroupCodec
  nu: GroupCodec


class Moments(NamedTuple):
  """The moments of one leaf at rest."""

  mu: Encoded
  nu: Encoded


_IN_F32 = Groups(Plain("float32"), Plain("float32"))


def default_quantize_mask(path: str, leaf: Any) -> bool:
  """Whether a leaf's moments are encoded unless the user says otherwise.

  True for leaves of at least 4096 values and 16 columns that are neither norms
  nor biases by their names. Those stay in f32, stacked over layers or not: they
  are less than a thousandth of a model.

  A name is a norm's if it *ends* in a norm, as `input_layernorm`, `q_norm` and
  `norm_1` do and `norm_mlp` does not, or is `ln` with anything, as `ln_f`; a
  bias's if `bias` is one of its words; `scale`, `gamma` and `beta` belong to
  norms. Only the leaf's own name and the one above it count, and a `kernel` or
  an `embedding` is a matrix whatever is above it.

  Args:
    path: such as "layers/attn/qkv/kernel"; dots separate names too.
    leaf: array or `jax.ShapeDtypeStruct`.

  Returns:
    True to encode the leaf's moments.
  """
  if leaf.size < _SMALLEST_LEAF or leaf.shape[-1] < _SHORTEST_ROW:
    return False
  names = [x for x in re.split("[/.]", path) if not x.isdigit()] or [""]
  words = _words(names[-1])
  if names[-1] in ("kernel", "embedding"):
    return True
  if "bias" in words or words[-1] in ("scale", "gamma", "beta"):
    return False
  return not any(_names_norm(name) for name in names[-2:])


def _names_norm(name: str) -> bool:
  words = [word.rstrip("0123456789") for word in _words(name)]
  words = [word for word in words if len(word) > 1] or [""]
  return words[-1].endswith(("norm", "norms")) or "ln" in (words[0], words[-1])


def _words(name: str) -> list[str]:
  return re.split("[^a-z0-9]+", name.lower())


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree with paths such as "layers/attn/qkv/kernel".

  `nnx.Variable`s end theirs in "value" where they are in the tree; that is left
  out, so that a path is the same with and without them.
  """
  out = []
  for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
      keys = keys[:-1]
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    out.append((path, jnp.asarray(leaf) if isinstance(leaf, float) else leaf))
  return out


def choose_groups(
  op: str, params: Any, codec: MomentCodec, mask: QuantizeMask | None
) -> list[Groups]:
  """The group codecs of every leaf of `params`, in order.

  Args:
    op: the public function that asks, for error messages.
    params: tree of arrays or `jax.ShapeDtypeStruct`s.
    codec: the codec of leaves to encode.
    mask: which those are; None for `default_quantize_mask`.

  Returns:
    One `Groups` a leaf.

  Raises:
    TypeError: a leaf is not real floating.
    ValueError: `mask` chooses a scalar.
  """
  mask = default_quantize_mask if mask is None else mask
  out = []
  for path, leaf in leaf_paths(params):
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"{op}: parameters must be real floating, got {dtype} at {path!r}; "
        "leave it out with optax.masked or optax.partition"
      )
    chosen = mask(path, leaf)
    if chosen and leaf.ndim == 0:
      raise ValueError(
        f"{op}: quantize_mask must choose arrays with an axis, got the scalar "
        f"at {path!r}; return False for it"
      )
    out.append(Groups(codec.mu, codec.nu) if chosen else _IN_F32)
  return out


def stored_groups(op: str, moments: Moments, codec: MomentCodec) -> Groups:
  """The group codecs that wrote the moments of a leaf: `codec`'s, or f32.

  Args:
    op: the public function that asks, for error messages.
    moments: of one leaf.
    codec: the codec of leaves that are encoded.

  Returns:
    The leaf's `Groups`.

  Raises:
    ValueError: neither can have written them.
  """
  if moments.mu.codes.dtype == moments.nu.codes.dtype == jnp.float32:
    return _IN_F32
  groups = Groups(codec.mu, codec.nu)
  for encoded, group in zip(moments, groups, strict=True):
    got, want = _layout(encoded), _rest_layout(group, encoded.codes.shape)
    if got != want:
      raise ValueError(
        f"{op}: codec {codec.name!r} keeps a moment as {want}, got {got}; pass "
        "the codec that the state was made with (to change it, go through "
        "to_adam_state and from_adam_state)"
      )
  return groups


def _layout(encoded: Encoded) -> str:
  return ", ".join(f"{x.dtype}{list(x.shape)}" for x in encoded)


@functools.lru_cache(maxsize=4096)
def _rest_layout(group: GroupCodec, shape: tuple[int, ...]) -> str:
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  noise = x if group.needs_noise else None
  return _layout(jax.eval_shape(group.encode, x, noise))


def flatten(fields: Sequence[Any]) -> list[Moments]:
  """The moments of every leaf, in order, from a state's six trees."""
  columns = [jax.tree.leaves(field) for field in fields]
  return [
    Moments(Encoded(*leaves[:3]), Encoded(*leaves[3:]))
    for leaves in zip(*columns, strict=True)
  ]


def unflatten(trees: Sequence[Any], moments: Sequence[Moments]) -> list[Any]:
  """Six trees from the moments of every leaf: the inverse of `flatten`.

  Args:
    trees: one for each field, whose structure it takes.
    moments: of every leaf, in order.

  Returns:
    Trees for `mu_codes, mu_amax, mu_range, nu_codes, nu_amax, nu_range`.
  """
  rows = [(*mu, *nu) for mu, nu in moments]
  return [
    jax.tree.structure(tree).unflatten([row[i] for row in rows])
    for i, tree in enumerate(trees)
  ]


def fields_like(params: Any) -> list[Any]:
  """Six trees of the structure that a state for `params` has.

  Boxes around parameters (`nnx.Variable`, Linen's `Partitioned`) stay around
  the codes, which are sharded as they say. Statistics are bare arrays: they
  have other shapes, where the same sharding need not be possible.
  """
  bare = nnx.as_pure(meta.unbox(params))
  return [params, bare, bare, params, bare, bare]


@functools.partial(jax.jit, static_argnames=("groups", "whole"), inline=True)
def encode(
  groups: Groups,
  mu: Array,
  nu: Array,
  key: Array,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> Moments:
  """Encodes the moments of one leaf.

  Args:
    groups: the leaf's group codecs.
    mu: f32.
    nu: f32 of the same shape.
    key: from `stochastic.leaf_key`; mu takes the low half of each of its words,
      nu the high half.
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    The moments at rest.
  """

  def f(mu, nu, key):
    noise = [None, None]
    if groups.mu.needs_noise or groups.nu.needs_noise:
      words = stochastic.random_words(key, mu.shape, start=start, whole=whole)
      noise = stochastic.low_half(words), stochastic.high_half(words)
    return Moments(
      *(
        group.encode(x, half if group.needs_noise else None)
        for group, x, half in zip(groups, (mu, nu), noise, strict=True)
      )
    )

  return _partitioned_like(mu, f)(mu, nu, key)


@functools.partial(jax.jit, static_argnames="groups", inline=True)
def decode(groups: Groups, moments: Moments) -> tuple[Array, Array]:
  """Decodes the moments of one leaf to f32."""

  def f(moments):
    return groups.mu.decode(moments.mu), groups.nu.decode(moments.nu)

  return _partitioned_like(moments.mu.codes, f)(moments)


@functools.partial(jax.jit, static_argnames="whole", inline=True)
def round_to_bfloat16(
  x: Array,
  key: Array,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> Array:
  """Rounds one f32 leaf to bfloat16 stochastically, key from `leaf_key`."""

  def f(x, key):
    words = stochastic.random_words(key, x.shape, start=start, whole=whole)
    return stochastic.round_to_bfloat16(x, words)

  return _partitioned_like(x, f)(x, key)


def _partitioned_like(x: Array, f: Callable) -> Callable:
  """`f` as the compiler partitions it, its results typed to lie as x does.

  Where x is sharded over explicit axes, JAX refuses to reshape a row into
  groups that lie across devices and makes random words whole on each of them.
  The compiler, left to itself, does neither.
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
