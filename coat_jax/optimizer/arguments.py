# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of optimizers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from coat_jax.checks import (
  ANY,
  COUNT,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  check_array,
  check_number,
  check_whole,
  is_array,
  refuse,
)


class _Rule(NamedTuple):
  """The rule for a hyperparameter, and a remedy for the caller."""

  allowed: Range
  remedy: str
  may_be_schedule: bool = False
  may_be_none: bool = False
  is_whole: bool = False


# Nearer to 1 f32 rounds to 1: the bias correction would divide by 0, and a
# moment never move.
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
  """Checks hyperparameters by their names; arrays by kind and shape alone.

  Args:
    op: the public function that asks, for error messages.
    **values: names are those of `_RULES`, or `adam_` and such a name.

  Raises:
    TypeError: one is no number, or a fraction where steps are counted.
    ValueError: one is outside its range, or not finite.
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
  """Raises where values are not the three numbers of Newton and Schulz."""
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
  """Raises a TypeError where `tx` has no `init` and `update`."""
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
  """A mask of weight decay as a function of the parameters.

  Args:
    op: the public function that asks, for error messages.
    name: of the argument.
    mask: tree of bools that is a prefix of the parameters' tree, a function
      that gives one, or None.

  Returns:
    A function that checks the tree; None for None.

  Raises:
    TypeError: it is neither, or (by the function) leaves are no bools.
    ValueError: (by the function) the tree is not the parameters'.
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
