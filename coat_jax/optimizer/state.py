# SPDX-License-Identifier: Apache-2.0
"""Optimizer states with FP8 moments: the classes, and functions that make them.

A codec encodes one array, whereas a state stores trees. A `Moment` holds one
moment of all parameters, both in the states of our optimizers and in what
`encoded` makes of any other optimizer's state. Programs find moments by this
class (`moments_in`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax import mesh
from coat_jax.codecs import Encoded, MomentCodec
from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics.checks import a
from coat_jax.optimizer import arguments, boxes
from coat_jax.optimizer.masks import is_encoded, plain_codec

# The stored moments of one leaf, and the codec of each of them.
Stored = tuple[Encoded, ...]
GroupCodecs = tuple[GroupCodec, ...]


# The optimizer that makes each state, for error messages.
_MAKERS = {
  "ScaleByCoatAdamState": "coat_adamw",
  "ScaleByCoatLionState": "coat_lion",
  "ScaleByCoatMuonState": "coat_muon",
  "EncodedState": "encoded",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moment:
  """One moment of all parameters, as a state stores it.

  The fields of `codecs.Encoded` are trees with the structure of the parameters.
  Boxes around parameters (`nnx.Variable`, Linen's `Partitioned`) stay around
  codes and statistics, so programs that read axis names shard both like the
  parameter. The name of the last axis stays around statistics only if its
  devices divide both columns and groups evenly. If no mesh is known when the
  state is made, neither set nor in the box, that name is dropped, so the
  statistics are replicated along the last axis. A leaf that is not encoded
  stores its values in `codes`, in f32 or complex64, and scalar zeros, without
  names, as statistics.

  Attributes:
    codes: shape=leaf.shape, in the codec's dtype.
    amax: shape=(..., ceil(n / group_size)).
    range: shape=(..., ceil(n / group_size)).
    codec: encodes the leaves. It is part of the tree's structure, not a leaf.
  """

  codes: Any
  amax: Any
  range: Any
  codec: GroupCodec = dataclasses.field(metadata={"static": True})

  def leaves(self) -> list[Encoded]:
    """Lists what is stored for each parameter, in the order of the tree."""
    columns = map(jax.tree.leaves, (self.codes, self.amax, self.range))
    return [Encoded(*row) for row in zip(*columns, strict=True)]

  def codec_of(self, encoded: Encoded) -> GroupCodec:
    """Returns a leaf's codec: `codec`, or `Plain` if it is not encoded."""
    if is_encoded(encoded):
      return self.codec
    return plain_codec(jnp.iscomplexobj(encoded.codes))


def make_moment(
  like: Any,
  leaves: Sequence[Encoded],
  codec: GroupCodec,
  mesh: boxes.AnyMesh | None = None,
) -> Moment:
  """Makes a moment with these leaves and the structure of `like`.

  `mesh` is the mesh of the parameters, if their types have one.
  """
  return Moment(
    jax.tree.structure(like).unflatten([x.codes for x in leaves]),
    boxes.box_statistics(like, [x.amax for x in leaves], mesh),
    boxes.box_statistics(like, [x.range for x in leaves], mesh),
    codec,
  )


def replace_leaves(old: Moment, leaves: Sequence[Encoded]) -> Moment:
  """Returns a moment with new leaves; boxes stay, whatever mesh is set."""
  return Moment(
    jax.tree.structure(old.codes).unflatten([x.codes for x in leaves]),
    jax.tree.structure(old.amax).unflatten([x.amax for x in leaves]),
    jax.tree.structure(old.range).unflatten([x.range for x in leaves]),
    old.codec,
  )


def is_moment(node: Any) -> bool:
  return isinstance(node, Moment)


def moments_in(tree: Any) -> list[Moment]:
  """Lists all moments in a tree, such as a train state, in order."""
  return [x for x in jax.tree.leaves(tree, is_leaf=is_moment) if is_moment(x)]


class ScaleByCoatAdamState(NamedTuple):
  """State of Adam with encoded moments."""

  # shape=(), dtype=jnp.int32
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu: Moment
  nu: Moment


class ScaleByCoatLionState(NamedTuple):
  """State of Lion with an encoded moment."""

  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu: Moment


class ScaleByCoatMuonState(NamedTuple):
  """State of Muon with an encoded moment."""

  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  mu: Moment


MomentState = ScaleByCoatAdamState | ScaleByCoatLionState | ScaleByCoatMuonState


class EncodedState(NamedTuple):
  """State of `encoded`: the inner optimizer's, with `Moment`s as fields."""

  # shape=(), dtype=jnp.int32: number of steps, only for the random words.
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  inner: optax.OptState


class LowBitsState(NamedTuple):
  """State of a fused optimizer with weights of 24 bits.

  `low` is a tree of plain arrays with the parameters' structure. `join_weights`
  returns the weights that it and the parameters represent.
  """

  low: Any  # shape=leaf.shape, dtype=jnp.int8; shape=() if none are kept
  inner: MomentState


FusedState = MomentState | LowBitsState


@dataclasses.dataclass(frozen=True)
class MomentOptions:
  """The options that our optimizers share; see `coat_adamw`.

  Attributes:
    op: the public function's name, for error messages.
    state_type: the type of the state. A state with one moment uses the codec's
      first one.
  """

  op: str
  state_type: type[MomentState]
  # The user's values are Any: our own checks have better messages.
  codec: Any
  quantize_mask: Any
  seed: Any
  implementation: Any = None
  shardings: Any = None

  def __post_init__(self):
    arguments.check_codec(self.op, self.codec)
    arguments.check_hyperparameters(self.op, seed=self.seed)

  def init(self, params: Any) -> Any:
    """Makes the state before the first step, sharded like the parameters."""
    op, mask = self.op, self.quantize_mask
    groups = self.codec.groups[: len(self.state_type._fields) - 1]
    if isinstance(params, placeholder_type()):
      moments = [marked_moment(params, group) for group in groups]
      return self.state_type(jnp.zeros([], jnp.int32), *moments)
    chosen = arguments.choose_groups(op, params, groups, mask)
    # Without this the compiler encodes constants itself, for half a minute.
    zero = jax.lax.optimization_barrier(jnp.zeros([], jnp.float32))
    stored = []
    for leaf, own in zip(jax.tree.leaves(params), chosen, strict=True):
      # Zeros are sharded like the parameter, and never in memory under jit.
      zeros = jnp.full_like(leaf, zero, dtype=jnp.float32)
      stored.append(_encode_zeros(own, zeros))
    where = boxes.mesh_of(params)
    moments = [
      make_moment(params, [row[j] for row in stored], group, where)
      for j, group in enumerate(groups)
    ]
    return self.state_type(jnp.zeros([], jnp.int32), *moments)


def check_state(op: str, state: Any, kind: type, codec: MomentCodec) -> None:
  """Raises if `state` has another type, or its moments another codec."""
  if not isinstance(state, kind):
    raise TypeError(
      f"{op}: state must be {a(kind)}, got {a(type(state))}; "
      "pass what its init or update returned, or convert a state of optax with "
      "from_plain_state (of Adam also with from_adam_state)"
    )
  for moment in moments_in(state):
    if moment.codec not in codec.groups:
      raise ValueError(
        f"{op}: codec {codec.name!r} must be the one that the state was made "
        f"with, got a moment of {moment.codec}; pass that codec (to change it, "
        "go through to_plain_state and from_plain_state)"
      )


@functools.cache
def placeholder_type() -> type:
  """Returns the type of what `optax.tree.map_params` passes to `init`."""
  kinds = []

  def init(params):
    kinds.append(type(params))
    return params

  optax.tree.map_params(init, lambda x: x, ())
  return kinds[0]


def marked_moment(placeholder: Any, codec: GroupCodec) -> Moment:
  """Makes a moment whose codes `optax.tree.map_params` takes for parameters.

  Statistics may not be shardable in the same way, so a whole tree of them is
  one leaf here, which `transform_non_params` maps.
  """
  leaf = jnp.zeros([], jnp.int32)
  return Moment(placeholder, leaf, leaf, codec)


def next_state(
  state: MomentState, count: ArrayLike, stored: Sequence[Stored]
) -> Any:
  """Returns the same state with a new count and new moments."""
  new = [
    replace_leaves(old, [row[j] for row in stored])
    for j, old in enumerate(state[1:])
  ]
  return type(state)(count, *new)


def stored_leaves(state: MomentState) -> list[tuple[Stored, GroupCodecs]]:
  """Lists each leaf's moments and the codecs that encoded them."""
  moments = state[1:]
  return [
    (row, tuple(m.codec_of(x) for m, x in zip(moments, row, strict=True)))
    for row in zip(*(moment.leaves() for moment in moments), strict=True)
  ]


def find_states(
  op: str, opt_state: Any, kind: Any, remedy: str = ""
) -> list[Any]:
  """Lists all states of a type or union; a ValueError if there is none."""
  leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
  found = [leaf for leaf in leaves if isinstance(leaf, kind)]
  if not found:
    kinds = getattr(kind, "__args__", (kind,))
    makers = [_MAKERS.get(x.__name__, "optax.adamw") for x in kinds]
    raise ValueError(
      f"{op}: the optimizer state must hold a "
      f"{' or '.join(x.__name__ for x in kinds)}, got "
      f"{type(opt_state).__name__} without one; pass what init or update of "
      f"{' or '.join(makers)} returned{remedy}"
    )
  return found


@functools.partial(jax.jit, static_argnames="groups", inline=True)
def _encode_zeros(groups: GroupCodecs, zeros: Array) -> Stored:
  """Encodes the zero moments of one leaf before its first step.

  Zeros are encoded as zeros whatever the noise is, so we draw none: `init`
  compiles in two thirds of the time.
  """

  def f(zeros):
    noise = jnp.full_like(zeros, 0.5)
    return tuple(
      group.encode(zeros, noise if group.needs_noise else None)
      for group in groups
    )

  return mesh.run_whole(f, zeros, out_specs=mesh.spec_of(zeros))
