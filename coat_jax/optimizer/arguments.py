# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of optimizers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.codecs import MomentCodec
from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics.checks import (
  ANY,
  COUNT,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  check_array,
  check_number,
  check_whole,
  described,
  is_array,
  refuse,
)
from coat_jax.optimizer.masks import (
  QuantizeMask,
  default_quantize_mask,
  leaf_paths,
  plain_codec,
)


class _Rule(NamedTuple):
  """The rule for a hyperparameter, and a remedy for the caller."""

  allowed: Range
  remedy: str
  may_be_schedule: bool = False
  may_be_none: bool = False
  is_whole: bool = False


# Closer to 1, f32 rounds to 1: the bias correction would divide by 0, and a
# moment would never move.
_DECAY = _Rule(Range(0, 0.9999999), "usual are 0.9 to 0.999")
_RATE = _Rule(
  NOT_NEGATIVE,
  "a schedule is a function of the step",
  may_be_schedule=True,
)
_EPS = _Rule(NOT_NEGATIVE, "1e-8 is usual")
_RULES = {
  "learning_rate": _RATE,
  "adam_learning_rate": _RATE._replace(may_be_none=True),
  "weight_decay": _RATE._replace(remedy="0 decays nothing"),
  "b1": _DECAY,
  "b2": _DECAY,
  "beta": _DECAY,
  "eps": _EPS,
  "eps_root": _EPS._replace(remedy="0 is usual"),
  "ns_steps": _Rule(COUNT, "5 is usual", is_whole=True),
  "consistent_rms": _Rule(
    POSITIVE, "0.2 is near AdamW's, None scales by shapes", may_be_none=True
  ),
  "seed": _Rule(ANY, "it is taken modulo 2^32", is_whole=True),
  "step": _Rule(ANY, "pass the state's count", is_whole=True),
  "count": _Rule(
    Range(0, 2**31 - 1), "pass how many steps there were", is_whole=True
  ),
}


def check_hyperparameters(op: str, **values: Any) -> None:
  """Checks hyperparameters by their names, which are those of `_RULES`.

  A name may begin with `adam_`. Arrays are checked by kind and shape alone.
  """
  for name, value in values.items():
    rule = _RULES.get(name) or _RULES[name.removeprefix("adam_")]
    is_schedule = rule.may_be_schedule and callable(value)
    if is_schedule or rule.may_be_none and value is None:
      continue
    others = ["a schedule"] * rule.may_be_schedule + ["None"] * rule.may_be_none
    or_else = "".join(f" or {x}" for x in others).strip()
    check = check_whole if rule.is_whole else check_number
    check(op, name, value, rule.allowed, rule.remedy, or_else=or_else)


def check_coefficients(op: str, values: Any) -> None:
  """Raises unless values are the three numbers of a Newton-Schulz iteration."""
  remedy = "leave ns_coeffs out for Muon's own"
  if is_array(values):
    check_array(op, "ns_coeffs", values, "three numbers", ndim=1, remedy=remedy)
  elif not isinstance(values, tuple | list):
    refuse(TypeError, op, "ns_coeffs", "three numbers", values, remedy)
  if len(values) != 3:
    refuse(ValueError, op, "ns_coeffs", "three numbers", values, remedy)
  for i, value in enumerate(() if is_array(values) else values):
    check_number(op, f"ns_coeffs[{i}]", value, ANY, remedy)


def check_optimizer(op: str, name: str, tx: Any) -> None:
  """Raises a TypeError if `tx` has no `init` and `update`."""
  if all(callable(getattr(tx, part, None)) for part in ("init", "update")):
    return
  made = callable(tx) and getattr(tx, "__name__", None)
  remedy = "pass what a function of optax returns, such as optax.lion(1e-3)"
  if made:
    remedy = f"call it, as in {made}(1e-3)"
  refuse(TypeError, op, name, "an optimizer with init and update", tx, remedy)


def check_decay_mask(
  op: str, name: str, mask: Any
) -> Callable[[Any], Any] | None:
  """Turns a mask of weight decay into a function that checks its tree of bools.

  `mask` is a prefix of the parameters' tree, a function that returns one, or
  None, which stays None.
  """
  if mask is None:
    return None
  if not callable(mask):
    _check_bools(op, name, mask)

  def checked(params: Any) -> Any:
    tree = mask(params) if callable(mask) else mask
    _check_bools(op, name, tree)
    try:
      jax.tree.map(lambda chosen, part: None, tree, params)
    except ValueError as error:
      raise ValueError(
        f"{op}: {name} must have the structure of the parameters, or of the "
        f"tree's upper part, got {jax.tree.structure(tree)} for "
        f"{jax.tree.structure(params)}; pass a function of the parameters"
      ) from error
    return tree

  return checked


def _check_bools(op: str, name: str, tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, bool | np.bool_):
      continue
    if not is_array(leaf) or leaf.dtype != bool:
      rule = "a function of the parameters or a tree of bools"
      refuse(TypeError, op, name, rule, leaf, "True decays a leaf's weights")


def check_codec(op: str, codec: Any) -> None:
  """Raises a TypeError if `codec` is not a `MomentCodec`."""
  if not isinstance(codec, MomentCodec):
    raise TypeError(
      f"{op}: codec must be a MomentCodec, got {described(codec)}; call a "
      "function of codecs, as in codec=codecs.coat()"
    )


def choose_groups(
  op: str,
  params: Any,
  groups: tuple[GroupCodec, ...],
  mask: QuantizeMask | None,
) -> list[tuple[GroupCodec, ...]]:
  """Lists the codecs of every leaf of `params`, one for each moment.

  `groups` are the codecs of leaves that `mask` chooses; other leaves are plain.
  Raises if a leaf is neither floating nor complex, or if `mask` chooses a
  complex leaf or a scalar.
  """
  mask = default_quantize_mask if mask is None else mask
  if not callable(mask):
    raise TypeError(
      f"{op}: quantize_mask must be a function (path, leaf) -> bool, got "
      f"{mask!r}; for every leaf that can be encoded leave it out"
    )
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
    # All moments but the first average squares, which are real.
    plain = (plain_codec(is_complex), *(plain_codec(),) * (len(groups) - 1))
    out.append(groups if chosen else plain)
  return out


def check_gradients(op: str, grads: Sequence[tuple[str, Any]]) -> None:
  """Raises a TypeError if a gradient is neither floating nor complex."""
  for path, g in grads:
    if not is_array(g) or not jnp.issubdtype(g.dtype, jnp.inexact):
      raise TypeError(
        f"{op}: gradients must be floating or complex, got {described(g)} at "
        f"{path!r}; cast it"
      )
