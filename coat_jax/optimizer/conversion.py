# SPDX-License-Identifier: Apache-2.0
"""Converts optimizer states between FP8 and optax's f32, in both directions.

A plain state is the state of an optax optimizer, with moments in f32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path
from jax.typing import ArrayLike

from coat_jax.numerics import stochastic
from coat_jax.numerics.checks import flatten_like
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import arguments
from coat_jax.optimizer.masks import in_order, leaf_paths
from coat_jax.optimizer.matrices import COEFFICIENTS
from coat_jax.optimizer.state import (
  EncodedState,
  Moment,
  MomentState,
  ScaleByCoatAdamState,
  ScaleByCoatLionState,
  ScaleByCoatMuonState,
  check_values,
  find_states,
  is_moment,
  is_state,
)
from coat_jax.optimizer.step import decode, encode
from coat_jax.optimizer.weights import in_f32

# Maps our types of states to optax's.
_THEIRS = {
  ScaleByCoatAdamState: optax.ScaleByAdamState,
  ScaleByCoatLionState: optax.ScaleByLionState,
  ScaleByCoatMuonState: optax.contrib.MuonState,
}
_PLAIN = "the unencoded optimizer's state"
_REMEDY = "pass what that optimizer's init or update returned"


def to_plain_state(
  opt_state: Any, *, ns_coeffs: tuple[float, float, float] = COEFFICIENTS
) -> Any:
  """Converts our states to states of optax's optimizers, with f32 moments.

  An `EncodedState` becomes the state of its inner optimizer. States of
  `coat_adamw`, `coat_lion` and `coat_muon` become those of optax's AdamW, Lion
  and Muon. Muon's arrays are in optax's order, but the tree's structure
  differs; docs/optimizer.md shows how to restore optax's structure.

  Args:
    opt_state: one of these states, or an optimizer state that contains one.
    ns_coeffs: coefficients of Muon's iteration. Optax's state stores them; ours
      does not.

  Returns:
    The same tree with optax's states instead of ours.

  Raises:
    TypeError: `ns_coeffs` are not numbers; `opt_state` contains shapes.
    ValueError: `opt_state` contains no such state, or `ns_coeffs` are not three
      numbers.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_lion
    >>> from coat_jax.optimizer import to_plain_state
    >>> state = coat_lion(1e-4).init({"w": jnp.ones((64, 128))})
    >>> print(to_plain_state(state)[0].mu["w"].dtype)
    float32
  """
  op = "to_plain_state"
  arguments.check_coefficients(op, ns_coeffs)
  find_states(op, opt_state)
  remedy = f"for its shapes, use jax.eval_shape({op}, opt_state)"
  check_values(op, opt_state, remedy)
  return jax.tree.map(
    lambda x: _decoded(x, ns_coeffs) if is_state(x) else jnp.array(x),
    opt_state,
    is_leaf=is_state,
  )


def from_plain_state(
  opt_state: Any,
  like: Any,
  *,
  count: ArrayLike = 0,
  seed: ArrayLike = 0,
) -> Any:
  """Converts states of optax's optimizers to ours; inverts `to_plain_state`.

  To change a state's codec, call `to_plain_state` and then this function.

  Args:
    opt_state: what `to_plain_state` returned, or a state that optax made.
    like: a state like the one to return, or its shapes, such as
      `jax.eval_shape(coat_lion(...).init, params)`. It determines which fields
      and leaves are encoded, and by which codec.
    count: number of steps so far. Only an `EncodedState` uses it, for random
      words.
    seed: as for `coat_adamw`.

  Returns:
    A tree with the structure of `like`.

  Raises:
    TypeError: `count` or `seed` is not a whole number.
    ValueError: `count` is negative; `like` contains none of our states; or the
      structure or shapes of `opt_state` differ from those of `like`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax
    >>> from coat_jax import coat_lion
    >>> from coat_jax.optimizer import from_plain_state
    >>> params = {"w": jnp.ones((64, 128))}
    >>> like = jax.eval_shape(coat_lion(1e-4).init, params)
    >>> state = from_plain_state(optax.lion(1e-4).init(params), like)
    >>> print(state[0].mu.codes["w"].dtype)
    float8_e4m3fn
  """
  op, name = "from_plain_state", "opt_state"
  arguments.check_hyperparameters(op, count=count, seed=seed)
  find_states(op, like)
  states, treedef = jax.tree.flatten(like, is_leaf=is_state)
  out = []
  plain_states = flatten_like(op, name, opt_state, _PLAIN, treedef, _REMEDY)
  for want, plain in zip(states, plain_states, strict=True):
    if isinstance(want, MomentState):
      out.append(_encoded(op, want, plain, seed))
    elif isinstance(want, EncodedState):
      inner = encode_state(op, name, want.inner, plain, seed, count)
      out.append(_copied(EncodedState(jnp.int32(count), inner)))
    else:
      out.append(jnp.array(plain))
  return treedef.unflatten(out)


def _decoded(
  state: MomentState | EncodedState, ns_coeffs: tuple[float, float, float]
) -> Any:
  """Converts one of our states to optax's state."""
  if isinstance(state, EncodedState):
    return decode_state(state.inner, jnp.array)
  decoded: Any = decode_state(state, jnp.array)
  if isinstance(decoded, ScaleByCoatAdamState):
    # In optax, second moments of complex leaves have a complex dtype.
    mu, nu = decoded.mu, decoded.nu
    nu = jax.tree.map(lambda x, like: x.astype(like.dtype), nu, mu)
    decoded = decoded._replace(nu=nu)
  if isinstance(decoded, ScaleByCoatMuonState):
    decoded = *decoded, jnp.asarray(ns_coeffs, jnp.float32)
  return _THEIRS[type(state)](*decoded)


def _encoded(op: str, like: MomentState, plain: Any, seed: ArrayLike) -> Any:
  """Converts a state of optax to the type and codec of `like`."""
  theirs = _THEIRS[type(like)]
  if not isinstance(plain, theirs):
    raise ValueError(
      f"{op}: opt_state must have a {theirs.__name__} where like has a "
      f"{type(like).__name__}, got {type(plain).__name__}; pass what "
      "to_plain_state returned, or the state of optax's optimizer of this kind"
    )
  if jnp.shape(plain.count):
    raise ValueError(
      f"{op}: count must be a scalar, got shape {jnp.shape(plain.count)}; if "
      f"the state was made under jax.vmap, call {op} under jax.vmap too"
    )
  if isinstance(like, ScaleByCoatAdamState):
    # Our second moments of complex leaves have a real dtype.
    plain = plain._replace(nu=jax.tree.map(jnp.real, plain.nu))
  decoded = type(like)(*(getattr(plain, name) for name in like._fields))
  new = encode_state(op, "opt_state", like, decoded, seed, plain.count)
  return _copied(new)


def _copied(tree: Any) -> Any:
  """Copies all arrays, so that no shared buffer is donated twice."""
  return jax.tree.map(jnp.array, tree)


def decode_moment(moment: Moment) -> Any:
  """Decodes a moment to a tree of f32 arrays."""
  values = [decode((moment.codec_of(x),), (x,))[0] for x in moment.leaves()]
  return moment.decoded(values)


def decode_state(state: Any, other: Callable[[Any], Any] = lambda x: x) -> Any:
  """Decodes all moments of a state; applies `other` to all other leaves."""
  return jax.tree.map(
    lambda x: decode_moment(x) if is_moment(x) else other(x),
    state,
    is_leaf=is_moment,
  )


def encode_state(
  op: str, name: str, like: Any, decoded: Any, seed: ArrayLike, count: ArrayLike
) -> Any:
  """Inverts `decode_state`: encodes `decoded` with the codecs of `like`."""
  # Moments with equal paths belong to one parameter; `place` is their index.
  seen: dict[Any, tuple[int, int]] = {}

  def encode_moment(old: Moment, tree: Any) -> Moment:
    stored = []
    leaves = zip(tree_leaves_with_path(tree), old.leaves(), strict=True)
    for (keys, x), encoded in leaves:
      index, place = seen.get(keys, (len(seen), 0))
      seen[keys] = index, place + 1
      part = LeafPart(stochastic.leaf_key(seed, count, index))
      group = old.codec_of(encoded)
      stored += encode((group,), (in_f32(x),), part, first=place)
    return old.replace(stored)

  return jax.tree.structure(like, is_leaf=is_moment).unflatten(
    encode_moment(old, new) if is_moment(old) else new
    for old, new in pair_nodes(op, name, like, decoded)
  )


def pair_nodes(
  op: str, name: str, like: Any, decoded: Any
) -> list[tuple[Any, Any]]:
  """Pairs each moment or other leaf of `like` with its part of `decoded`."""
  nodes, treedef = jax.tree.flatten(like, is_leaf=is_moment)
  found = flatten_like(op, name, decoded, _PLAIN, treedef, _REMEDY)
  pairs = list(zip(nodes, found, strict=True))
  return [
    (old, _paired(op, name, old, new)) if is_moment(old) else (old, new)
    for old, new in pairs
  ]


def _paired(op: str, name: str, old: Moment, new: Any) -> Any:
  """Arranges the leaves of a decoded moment like those of `old`, by path."""
  leaves = leaf_paths(new)
  paths = [path for path, _ in leaf_paths(old.codes)]
  got = [f"{path} {jnp.shape(x)}" for path, x in leaves]
  want = [f"{a} {b}" for a, b in zip(paths, old.shapes(), strict=True)]
  if sorted(got) != sorted(want):
    raise ValueError(
      f"{op}: {name} must have a moment for each parameter, got none for "
      f"{[x for x in want if x not in got]}, and unused ones for "
      f"{[x for x in got if x not in want]}; pass a state for these parameters"
    )
  return jax.tree.structure(old.codes).unflatten(in_order(paths, leaves))
