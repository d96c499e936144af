# SPDX-License-Identifier: Apache-2.0
"""A run switched between optax's optimizers and encoded ones in its middle."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax.codecs import MomentCodec
from coat_jax.optimizer import moments
from coat_jax.optimizer.arguments import (
  check_coefficients,
  check_hyperparameters,
)
from coat_jax.optimizer.fields import FIELDS, EncodedState, is_field
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.moments import GroupCodecs
from coat_jax.optimizer.muon import COEFFICIENTS
from coat_jax.optimizer.state import (
  MomentState,
  ScaleByCoatAdamState,
  ScaleByCoatLionState,
  ScaleByCoatMuonState,
  check_codec,
  find_states,
)
from coat_jax.optimizer.stored_fields import (
  encode_fields,
  fields_of,
  plain_nodes,
  stored_fields,
)

# Optax's states, by ours.
_THEIRS = {
  ScaleByCoatAdamState: optax.ScaleByAdamState,
  ScaleByCoatLionState: optax.ScaleByLionState,
  ScaleByCoatMuonState: optax.contrib.MuonState,
}


def to_adam_state(opt_state: Any, codec: MomentCodec) -> Any:
  """The state of optax's Adam that a coat state stands for.

  Every `ScaleByCoatAdamState` in `opt_state` becomes an
  `optax.ScaleByAdamState` with f32 moments; all else stays. So the state of
  `coat_adamw` becomes the state of `optax.adamw`, and a bare one a bare one.

  Args:
    opt_state: a coat state, or any optimizer state that holds some.
    codec: the codec it was made with.

  Returns:
    The same tree with optax's states.

  Raises:
    TypeError: `codec` is not a `MomentCodec`.
    ValueError: it holds no coat state, or one of another codec.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_adamw, codecs, to_adam_state
    >>> codec = codecs.coat()
    >>> state = coat_adamw(1e-3, codec=codec).init({"w": jnp.ones((64, 128))})
    >>> print(to_adam_state(state, codec)[0].mu["w"].dtype)
    float32
  """
  op = "to_adam_state"
  check_codec(op, codec)

  def convert(state):
    return _decoded(op, state, codec)

  return _convert(op, convert, opt_state, ScaleByCoatAdamState)


def from_adam_state(
  opt_state: Any,
  *,
  codec: MomentCodec,
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
) -> Any:
  """The coat state that stands for a state of optax's Adam.

  Every `optax.ScaleByAdamState` in `opt_state` becomes a
  `ScaleByCoatAdamState`; all else stays. The inverse of `to_adam_state` up to
  the codec's rounding.

  Args:
    opt_state: a state of Adam, or any optimizer state that holds some.
    codec: how the moments will be stored.
    quantize_mask: as for `scale_by_coat_adam`.
    seed: of the random words of stochastic rounding.

  Returns:
    The same tree with coat states.

  Raises:
    TypeError: as `scale_by_coat_adam`'s.
    ValueError: it holds no state of Adam.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from coat_jax import codecs, from_adam_state
    >>> state = optax.adamw(1e-3).init({"w": jnp.ones((64, 128))})
    >>> state = from_adam_state(state, codec=codecs.coat())
    >>> print(state[0].mu_codes["w"].dtype)
    float8_e4m3fn
  """
  op = "from_adam_state"
  check_codec(op, codec)
  check_hyperparameters(op, seed=seed)

  def convert(state):
    chosen = moments.choose_groups(op, state.mu, codec.groups, quantize_mask)
    trees = [state.mu, state.nu]
    return _encoded(ScaleByCoatAdamState, state.count, trees, chosen, seed)

  return _convert(op, convert, opt_state, optax.ScaleByAdamState)


def to_plain_state(
  opt_state: Any,
  codec: MomentCodec,
  *,
  ns_coeffs: tuple[float, float, float] = COEFFICIENTS,
) -> Any:
  """The states of optax's optimizers that ours stand for, with f32 moments.

  In the place of
    an `EncodedState` is the state of its inner optimizer,
    a `ScaleByCoatAdamState` an `optax.ScaleByAdamState`,
    a `ScaleByCoatLionState` an `optax.ScaleByLionState`,
    a `ScaleByCoatMuonState` an `optax.contrib.MuonState`;
  all else stays. So the state of `coat_lion` becomes that of `optax.lion`. The
  chain of `optax.contrib.muon` has one more part than that of `coat_muon`,
  without arrays: see docs/optimizer.md.

  Args:
    opt_state: such a state, or any optimizer state that holds some.
    codec: the codec it was made with.
    ns_coeffs: of Muon's iteration, which are in optax's state and not in ours.

  Returns:
    The same tree with optax's states.

  Raises:
    TypeError: `codec` is not a `MomentCodec`; `ns_coeffs` are no numbers.
    ValueError: it holds no such state, or one of another codec; there are not
      three `ns_coeffs`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_lion, codecs, to_plain_state
    >>> codec = codecs.coat()
    >>> state = coat_lion(1e-4, codec=codec).init({"w": jnp.ones((64, 128))})
    >>> print(to_plain_state(state, codec)[0].mu["w"].dtype)
    float32
  """
  op = "to_plain_state"
  check_codec(op, codec)
  check_coefficients(op, ns_coeffs)

  def convert(state):
    if not isinstance(state, EncodedState):
      return _decoded(op, state, codec, ns_coeffs)
    fields = stored_fields(state.inner)
    # Donation takes no buffer twice.
    nodes = [x if is_field(x) else jnp.array(x) for x in fields.nodes]
    return fields.replace(fields.decode(fields.groups(op, codec)), nodes)

  return _convert(op, convert, opt_state, EncodedState | MomentState)


def from_plain_state(
  opt_state: Any,
  like: Any,
  *,
  codec: MomentCodec,
  count: ArrayLike = 0,
  seed: ArrayLike = 0,
) -> Any:
  """Our states that stand for those of optax's optimizers.

  The inverse of `to_plain_state` up to the codec's rounding, and with it the
  way to another codec.

  Args:
    opt_state: what `to_plain_state` gives: a state of optax's optimizer, or any
      optimizer state that holds some.
    like: what is to be made of it, such as
      `jax.eval_shape(coat_lion(...).init, params)`: which fields and leaves are
      encoded is taken from there.
    codec: the codec that `like` was made with.
    count: for an `EncodedState`, how many steps there were; random words go on
      from there. The other states know it.
    seed: of the random words of stochastic rounding.

  Returns:
    A tree of the structure of `like`.

  Raises:
    TypeError: `codec` is not a `MomentCodec`; `count` or `seed` is no whole
      number.
    ValueError: `count` is negative; `like` holds no state of ours, or one of
      another codec; or `opt_state` is not of its structure or its shapes.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from coat_jax import codecs, encoded, from_plain_state
    >>> codec, params = codecs.coat(), {"w": jnp.ones((64, 128))}
    >>> like = jax.eval_shape(encoded(optax.lion(1e-4), codec).init, params)
    >>> plain = optax.lion(1e-4).init(params)
    >>> state = from_plain_state(plain, like, codec=codec)
    >>> print(state.inner[0].mu.mu_codes["w"].dtype)
    float8_e4m3fn
  """
  op = "from_plain_state"
  check_codec(op, codec)
  check_hyperparameters(op, count=count, seed=seed)
  kinds = EncodedState | MomentState
  find_states(op, like, kinds)
  states, treedef = jax.tree.flatten(
    like, is_leaf=lambda x: isinstance(x, kinds)
  )
  out = []
  plain_states = plain_nodes(op, "opt_state", treedef, opt_state)
  for want, plain in zip(states, plain_states, strict=True):
    if isinstance(want, MomentState):
      out.append(_encoded_like(op, want, plain, codec, seed))
      continue
    if not isinstance(want, EncodedState):
      out.append(jnp.array(plain))
      continue
    fields = stored_fields(want.inner)
    trees = fields.plain_fields(op, "opt_state", plain)
    encoded = encode_fields(
      fields.kinds, trees, fields.groups(op, codec), seed, count
    )
    nodes = [
      x if is_field(old) else jnp.array(x)
      for x, old in zip(
        plain_nodes(op, "opt_state", fields.treedef, plain),
        fields.nodes,
        strict=True,
      )
    ]
    out.append(EncodedState(jnp.int32(count), fields.replace(encoded, nodes)))
  return treedef.unflatten(out)


def _decoded(
  op: str,
  state: MomentState,
  codec: MomentCodec,
  ns_coeffs: tuple[float, float, float] = COEFFICIENTS,
) -> Any:
  """Optax's state that one of ours stands for."""
  fields = stored_fields(fields_of(state))
  found = fields.decode(fields.groups(op, codec))
  if isinstance(state, ScaleByCoatAdamState):
    # optax has complex second moments of complex leaves.
    mu, nu = found
    found = [mu, jax.tree.map(lambda x, like: x.astype(like.dtype), nu, mu)]
  if isinstance(state, ScaleByCoatMuonState):
    found.append(jnp.asarray(ns_coeffs, jnp.float32))
  # Donation takes no buffer twice: the count is a copy.
  return _THEIRS[type(state)](jnp.array(state.count), *found)


def _encoded(
  kind: type[MomentState],
  count: ArrayLike,
  trees: Sequence[Any],
  groups: Sequence[GroupCodecs],
  seed: ArrayLike,
) -> MomentState:
  """Our state of these moments; of complex ones squares are real again."""
  copies = [jax.tree.map(jnp.array, tree) for tree in trees]
  copies[1:] = [jax.tree.map(jnp.real, tree) for tree in copies[1:]]
  kinds = list(FIELDS)[: len(copies)]
  found = encode_fields(kinds, copies, groups, seed, count)
  return kind(jnp.array(count), *itertools.chain(*found))


def _encoded_like(
  op: str, want: MomentState, plain: Any, codec: MomentCodec, seed: ArrayLike
) -> MomentState:
  """Our state of the type and with the leaves of `want`."""
  theirs = _THEIRS[type(want)]
  if not isinstance(plain, theirs):
    raise ValueError(
      f"{op}: opt_state must have a {theirs.__name__} where like has a "
      f"{type(want).__name__}, got {type(plain).__name__}; pass what "
      "to_plain_state gave, or the state of optax's optimizer of this kind"
    )
  inner = fields_of(want)
  fields = stored_fields(inner)
  plain_inner = {name: getattr(plain, name) for name in inner}
  trees = fields.plain_fields(op, "opt_state", plain_inner)
  groups = fields.groups(op, codec)
  return _encoded(type(want), plain.count, trees, groups, seed)


def _convert(op: str, convert, opt_state: Any, kind: Any) -> Any:
  find_states(op, opt_state, kind)
  return jax.tree.map(
    lambda x: convert(x) if isinstance(x, kind) else x,
    opt_state,
    is_leaf=lambda x: isinstance(x, kind),
  )
