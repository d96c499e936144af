# SPDX-License-Identifier: Apache-2.0
"""Optimizer states with FP8 moments."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax.codecs import Encoded, MomentCodec
from coat_jax.codecs.factored import Factored, shape_of
from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics.checks import a, refuse
from coat_jax.optimizer import arguments, boxes
from coat_jax.optimizer.masks import is_encoded, plain_codec
from coat_jax.optimizer.zeros import encode_zeros

# The stored moments of one leaf, and the codec of each moment.
Stored = tuple[Encoded, ...]
GroupCodecs = tuple[GroupCodec, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moment:
  """One moment of all parameters, as a state stores it.

  `codes`, `amax` and `range` are trees with the structure and boxes
  (`nnx.Variable`, Linen's `Partitioned`) of the parameters, and contain the
  fields of `codecs.Encoded`. For a leaf that is not encoded, `codes` contains
  the values in f32 or complex64.

  Attributes:
    codes: shape=leaf.shape, in the codec's dtype; () for a factored leaf.
    amax, range: shape=(..., ceil(n / group_size)), or () if not used; for a
      factored leaf, the means of its rows and of its columns.
    codec: encodes the leaves. It is part of the tree's structure, not a leaf.
  """

  codes: Any
  amax: Any
  range: Any
  codec: GroupCodec = dataclasses.field(metadata={"static": True})
  # The parameters' structure, if their boxes differ from those of `codes`.
  structure: "_Structure | None" = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def decoded(self, values: Sequence[Any]) -> Any:
    """Makes a tree with the parameters' structure from its leaves."""
    if self.structure is not None:
      return self.structure.treedef.unflatten(values)
    return jax.tree.structure(self.codes).unflatten(values)

  def leaves(self) -> list[Encoded]:
    """Lists each parameter's encoded moment, in the order of the tree."""
    columns = map(jax.tree.leaves, (self.codes, self.amax, self.range))
    return [Encoded(*row) for row in zip(*columns, strict=True)]

  def codec_of(self, encoded: Encoded) -> GroupCodec:
    """Returns the codec of a leaf: `codec`, or `Plain` if it is not encoded."""
    if is_encoded(encoded):
      return self.codec
    return plain_codec(jnp.iscomplexobj(encoded.codes))

  def shapes(self) -> list[tuple[int, ...]]:
    """Lists each parameter's shape, in the order of the tree."""
    return [
      shape_of(x.amax, x.range)
      if isinstance(self.codec_of(x), Factored)
      else x.codes.shape
      for x in self.leaves()
    ]

  def replace(self, leaves: Sequence[Encoded]) -> "Moment":
    """Replaces the leaves, and keeps their boxes under any mesh."""
    return Moment(
      jax.tree.structure(self.codes).unflatten([x.codes for x in leaves]),
      jax.tree.structure(self.amax).unflatten([x.amax for x in leaves]),
      jax.tree.structure(self.range).unflatten([x.range for x in leaves]),
      self.codec,
      self.structure,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
  """A tree structure that equals any other: optax's placeholders need this."""

  treedef: Any

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, _Structure)

  def __hash__(self) -> int:
    return 0


def zero_moment(
  like: Any,
  codec: GroupCodec,
  chosen: Sequence[bool],
  mesh: boxes.AnyMesh | None,
  *,
  is_real: bool = False,
) -> Moment:
  """Makes a moment of zeros with the structure and boxes of `like`.

  Leaves that are not chosen are stored in f32, or in complex64 if they are
  complex and `is_real` is False.
  """

  def zeros(leaf, is_chosen):
    plain = plain_codec(not is_real and jnp.iscomplexobj(leaf))
    return encode_zeros(codec if is_chosen else plain, leaf)

  leaves = list(map(zeros, jax.tree.leaves(like), chosen))
  codes = jax.tree.structure(like).unflatten([x.codes for x in leaves])
  structure = None
  if isinstance(codec, Factored):
    # Scalars need boxes without axis names.
    structure = _Structure(jax.tree.structure(like))
    codes = boxes.box_like(like, [x.codes for x in leaves], mesh)
  return Moment(
    codes,
    boxes.box_like(like, [x.amax for x in leaves], mesh),
    boxes.box_like(like, [x.range for x in leaves], mesh),
    codec,
    structure,
  )


def is_moment(node: Any) -> bool:
  return isinstance(node, Moment)


def moments_in(tree: Any) -> list[Moment]:
  """Lists all moments in a tree, such as a train state, in tree order."""
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
  """State of `encoded`: the inner state, with encoded fields as `Moment`s."""

  # shape=(), dtype=jnp.int32: number of steps, used only for random words.
  count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
  inner: optax.OptState


class LowBitsState(NamedTuple):
  """State of a fused optimizer with 24-bit weights.

  `low` is a tree with the parameters' structure and boxes. `join_weights`
  combines the parameters and `low` into f32 weights.
  """

  low: Any  # shape=leaf.shape, dtype=jnp.int8; shape=() without low bytes
  inner: MomentState


FusedState = MomentState | LowBitsState


@dataclasses.dataclass(frozen=True)
class MomentOptions:
  """The options that our optimizers share; see `coat_adamw`."""

  op: str
  state_type: type[MomentState]
  # User input has type Any: our checks raise clearer errors than beartype.
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
    groups = self.codec.groups[: len(self.state_type._fields) - 1]
    count = jnp.zeros([], jnp.int32)
    if isinstance(params, placeholder_type()):
      moments = [marked_moment(params, group) for group in groups]
      return self.state_type(count, *moments)
    chosen = arguments.choose_leaves(self.op, params, self.quantize_mask)
    where = boxes.mesh_of(params)
    # All moments but the first are averages of squares, which are real.
    moments = [
      zero_moment(params, group, chosen, where, is_real=j > 0)
      for j, group in enumerate(groups)
    ]
    return self.state_type(count, *moments)


def check_state(op: str, state: Any, kind: type, codec: MomentCodec) -> None:
  """Raises unless `state` has the type `kind` and moments stored by `codec`."""
  if not isinstance(state, kind):
    raise TypeError(
      f"{op}: state must be {a(kind)}, got {a(type(state))}; "
      "pass the state that its init or last step returned, or convert optax's "
      "state with from_plain_state"
    )
  for i, moment in enumerate(moments_in(state)):
    # The moments of an `EncodedState` may be in any order.
    groups = codec.groups
    if isinstance(state, MomentState):
      groups = groups[i : i + 1]
    if moment.codec not in groups:
      raise ValueError(
        f"{op}: the state must have been made with the codec {codec.name!r}, "
        f"which stores {' or '.join(map(str, groups))}, got a moment of "
        f"{moment.codec}; pass the state's codec (to change it, use "
        "to_plain_state and then from_plain_state)"
      )


@functools.cache
def placeholder_type() -> type:
  """Returns the type of the placeholder in `optax.tree.map_params`."""
  kinds = []

  def init(params):
    kinds.append(type(params))
    return params

  optax.tree.map_params(init, lambda x: x, ())
  return kinds[0]


def marked_moment(placeholder: Any, codec: GroupCodec) -> Moment:
  """Makes a moment whose codes `optax.tree.map_params` treats as parameters.

  Statistics may need different shardings than parameters, so `amax` and `range`
  are a single leaf each, to which `transform_non_params` applies.
  """
  leaf = jnp.zeros([], jnp.int32)
  if isinstance(codec, Factored):
    return Moment(leaf, leaf, leaf, codec, _Structure(None))
  return Moment(placeholder, leaf, leaf, codec)


def stored_leaves(state: MomentState) -> list[tuple[Stored, GroupCodecs]]:
  """Lists for each leaf its moments and the codecs that encoded them."""
  moments = state[1:]
  return [
    (row, tuple(m.codec_of(x) for m, x in zip(moments, row, strict=True)))
    for row in zip(*(moment.leaves() for moment in moments), strict=True)
  ]


# Maps each type of state to the optimizer that makes it, for error messages.
_MAKERS = {
  EncodedState: "encoded",
  ScaleByCoatAdamState: "coat_adamw",
  ScaleByCoatLionState: "coat_lion",
  ScaleByCoatMuonState: "coat_muon",
}


def find_states(op: str, opt_state: Any, remedy: str = "") -> list[Any]:
  """Lists our states in a tree; raises a ValueError if there are none.

  Our states are `MomentState`s and `EncodedState`s.
  """
  leaves = jax.tree.leaves(opt_state, is_leaf=is_state)
  found = [leaf for leaf in leaves if is_state(leaf)]
  if not found:
    raise ValueError(
      f"{op}: the optimizer state must contain "
      f"{' or '.join(map(a, _MAKERS))}, got "
      f"{type(opt_state).__name__} without one; pass what init or update of "
      f"{' or '.join(_MAKERS.values())} returned{remedy}"
    )
  return found


def check_values(op: str, opt_state: Any, remedy: str) -> None:
  """Raises a TypeError if a state contains shapes instead of arrays."""
  for x in jax.tree.leaves(opt_state):
    if isinstance(x, jax.ShapeDtypeStruct):
      refuse(TypeError, op, "opt_state", "a state of arrays", x, remedy)


def is_state(node: Any) -> bool:
  return isinstance(node, MomentState | EncodedState)
