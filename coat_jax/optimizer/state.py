# SPDX-License-Identifier: Apache-2.0
"""States with encoded moments: what they are, and what they go with."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax.checks import a, described, is_array
from coat_jax.codecs import Encoded, MomentCodec
from coat_jax.optimizer import moments
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.moments import Stored

# Whose states they are, for error messages.
_MAKERS = {
  "ScaleByCoatAdamState": "coat_adamw",
  "ScaleByCoatLionState": "coat_lion",
  "ScaleByCoatMuonState": "coat_muon",
  "EncodedState": "encoded",
}


class ScaleByCoatAdamState(NamedTuple):
  """State of Adam with encoded moments.

  All fields but `count` are trees of the parameters' structure whose leaves are
  plain arrays: `Encoded` of `codecs.group`, once for each moment. A leaf that
  stays in f32 has its moments in `*_codes` and scalars in the others.
  """

  # shape=(), dtype=jnp.int32
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu_codes: optax.Updates  # shape=leaf.shape, dtype=the codec's
  mu_amax: optax.Updates  # shape=(..., ceil(n / group_size))
  mu_range: optax.Updates  # shape=(..., ceil(n / group_size))
  nu_codes: optax.Updates  # as mu_*
  nu_amax: optax.Updates
  nu_range: optax.Updates


class ScaleByCoatLionState(NamedTuple):
  """State of Lion with an encoded moment: `ScaleByCoatAdamState` without nu."""

  # shape=(), dtype=jnp.int32
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu_codes: optax.Updates  # shape=leaf.shape, dtype=the codec's
  mu_amax: optax.Updates  # shape=(..., ceil(n / group_size))
  mu_range: optax.Updates  # shape=(..., ceil(n / group_size))


class ScaleByCoatMuonState(NamedTuple):
  """State of Muon with an encoded moment: `ScaleByCoatAdamState` without nu."""

  # shape=(), dtype=jnp.int32
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu_codes: optax.Updates  # shape=leaf.shape, dtype=the codec's
  mu_amax: optax.Updates  # shape=(..., ceil(n / group_size))
  mu_range: optax.Updates  # shape=(..., ceil(n / group_size))


MomentState = ScaleByCoatAdamState | ScaleByCoatLionState | ScaleByCoatMuonState


class LowBitsState(NamedTuple):
  """State of a fused optimizer with weights of 24 bits.

  `low` is a tree of the parameters' structure whose leaves are plain arrays.
  The weight of a leaf that has bytes is `join_weights` of it and them.
  """

  low: Any  # shape=leaf.shape, dtype=jnp.int8; shape=() where none are kept
  inner: MomentState


FusedState = MomentState | LowBitsState


def check_codec(op: str, codec: Any) -> None:
  """Raises a TypeError where `codec` is not a `MomentCodec`."""
  if not isinstance(codec, MomentCodec):
    raise TypeError(
      f"{op}: codec must be a MomentCodec, got {described(codec)}; call a "
      "function of codecs, as in codec=codecs.coat()"
    )


def check_state(op: str, state: Any, kind: type) -> None:
  """Raises a TypeError where `state` is not of a kind, such as optax's own."""
  if not isinstance(state, kind):
    raise TypeError(
      f"{op}: state must be {a(kind)}, got {a(type(state))}; "
      "pass what its init or update gave, or convert a state of optax with "
      "from_plain_state (of Adam also with from_adam_state)"
    )


def init_state(
  op: str,
  params: Any,
  codec: MomentCodec,
  mask: QuantizeMask | None,
  kind: type[MomentState] = ScaleByCoatAdamState,
) -> MomentState:
  """The state of step 0.

  Args:
    op: the public function that asks, for error messages.
    params: tree of parameters.
    codec: how the moments are stored.
    mask: which leaves are encoded; None for `default_quantize_mask`.
    kind: of the state. One with fewer moments than the codec has the first.

  Returns:
    Moments of zeros, sharded like the parameters.
  """
  groups = codec.groups[: len(kind._fields) // len(Encoded._fields)]
  if isinstance(params, placeholder_type()):
    return _marked_state(params, len(groups), kind)
  chosen = moments.choose_groups(op, params, groups, mask)
  # The compiler would encode constants itself, for half a minute.
  zero = jax.lax.optimization_barrier(jnp.zeros([], jnp.float32))
  stored = []
  for leaf, own in zip(jax.tree.leaves(params), chosen, strict=True):
    # Sharded like the parameter, and never in memory under jit.
    zeros = jnp.full_like(leaf, zero, dtype=jnp.float32)
    stored.append(moments.encode_zeros(own, zeros))
  trees = moments.trees_like(params, len(groups))
  return make_state(jnp.zeros([], jnp.int32), trees, stored, kind)


@functools.cache
def placeholder_type() -> type:
  """What `optax.tree.map_params` gives to `init` in place of parameters."""
  kinds = []

  def init(params):
    kinds.append(type(params))
    return params

  optax.tree.map_params(init, lambda x: x, ())
  return kinds[0]


def _marked_state(
  placeholder: Any, count: int, kind: type[MomentState]
) -> MomentState:
  """A state that says which of its trees are like the parameters.

  Codes have their shapes. Statistics have others, and a sharding of theirs need
  not be possible: a tree of them is one leaf here, for `transform_non_params`.
  """
  leaf = jnp.zeros([], jnp.int32)
  return kind(leaf, *[placeholder, leaf, leaf] * count)


def make_state(
  count: ArrayLike,
  trees: Sequence[Any],
  stored: Sequence[Stored],
  kind: type[MomentState] = ScaleByCoatAdamState,
) -> MomentState:
  """A state of these moments, in trees of these structures."""
  return kind(count, *moments.unflatten(trees, stored))


def next_state(
  state: MomentState, count: ArrayLike, stored: Sequence[Stored]
) -> MomentState:
  """The same state with other moments."""
  return make_state(count, moments.moment_trees(state), stored, type(state))


def promoted(op: str, updates: optax.Updates, params: optax.Params | None):
  """Gradients in the dtypes that updates have: optax promotes them likewise.

  Raises:
    ValueError: gradients and parameters are trees of several structures.
  """
  if params is None:
    return updates
  grads, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
  try:
    leaves = treedef.flatten_up_to(params)
  except ValueError as error:
    raise ValueError(
      f"{op}: gradients must have the structure of the parameters, got "
      f"{jax.tree.structure(updates)} for {jax.tree.structure(params)}; pass "
      "the gradients of these parameters"
    ) from error
  return treedef.unflatten(
    None if g is None else g.astype(jnp.result_type(g, p))
    for g, p in zip(grads, leaves, strict=True)
  )


def check_gradients(op: str, grads: Sequence[tuple[str, Any]]) -> None:
  """Raises a TypeError where a gradient is neither floating nor complex."""
  for path, g in grads:
    if not is_array(g) or not jnp.issubdtype(g.dtype, jnp.inexact):
      raise TypeError(
        f"{op}: gradients must be floating or complex, got {described(g)} at "
        f"{path!r}; cast it"
      )


def pair_leaves(
  op: str, updates: optax.Updates, state: MomentState
) -> list[tuple[Array, Stored]]:
  """Gradients and moments, leaf by leaf.

  Args:
    op: the public function that asks, for error messages.
    updates: tree of gradients.
    state: as `init_state` made it.

  Returns:
    Pairs of a gradient and its moments.

  Raises:
    TypeError: gradients are neither floating nor complex.
    ValueError: they do not belong together.
  """
  grads = leaf_paths(updates)
  check_gradients(op, grads)
  leaves = moments.flatten(moments.moment_trees(state))
  shapes = [stored[0].codes.shape for stored in leaves]
  wrong = [
    f"{g.shape} for {shape} at {path!r}"
    for (path, g), shape in zip(grads, shapes, strict=False)
    if g.shape != shape
  ]
  if len(grads) != len(leaves):
    wrong = [f"{len(grads)} leaves for {len(leaves)}"]
  if wrong:
    raise ValueError(
      f"{op}: gradients must have the shapes of the parameters given to init, "
      f"got {wrong[0]}; initialize the state with these parameters"
    )
  return list(zip([g for _, g in grads], leaves, strict=True))


def find_states(
  op: str, opt_state: Any, kind: Any, remedy: str = ""
) -> list[Any]:
  """All states of a kind in an optimizer's state.

  Args:
    op: the public function that asks, for error messages.
    opt_state: any tree.
    kind: such as `ScaleByCoatAdamState`, or a union of several.
    remedy: what else the caller can do where there is none.

  Raises:
    ValueError: there is none.
  """
  leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
  found = [leaf for leaf in leaves if isinstance(leaf, kind)]
  if not found:
    kinds = getattr(kind, "__args__", (kind,))
    makers = [_MAKERS.get(x.__name__, "optax.adamw") for x in kinds]
    raise ValueError(
      f"{op}: the optimizer state must hold a "
      f"{' or '.join(x.__name__ for x in kinds)}, got "
      f"{type(opt_state).__name__} without one; pass what init or update of "
      f"{' or '.join(makers)} gave{remedy}"
    )
  return found
