# SPDX-License-Identifier: Apache-2.0
"""Checks optimizers' arguments, and the trees passed to `init` and `update`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from coat_jax.codecs import MomentCodec
from coat_jax.numerics.checks import (
  ANY,
  COUNT,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  check_array,
  check_kind,
  check_number,
  check_whole,
  described,
  flatten_like,
  is_array,
  refuse,
)
from coat_jax.optimizer.masks import (
  QuantizeMask,
  default_quantize_mask,
  leaf_path,
  leaf_paths,
)

# A decay rate closer to 1 may round to 1 in f32. The bias correction would then
# divide by 0, and the moment would never change.
_DECAY = check_number, Range(0, 0.9999999), "values from 0.9 to 0.999 are usual"
_SCHEDULE = "pass a number, or a schedule: a function of the step"
_RMS = "0.2 is near the RMS of AdamW's updates; None scales by shapes"
_STEPS = Range(0, 2**31 - 1)
# For each hyperparameter: its check, its range, and advice for error messages.
_RULES = {
  "learning_rate": (check_number, NOT_NEGATIVE, _SCHEDULE),
  "weight_decay": (check_number, NOT_NEGATIVE, "0 decays nothing"),
  "b1": _DECAY,
  "b2": _DECAY,
  "beta": _DECAY,
  "eps": (check_number, NOT_NEGATIVE, "1e-8 is usual"),
  "eps_root": (check_number, NOT_NEGATIVE, "0 is usual"),
  "ns_steps": (check_whole, COUNT, "5 is usual"),
  "consistent_rms": (check_number, POSITIVE, _RMS),
  "seed": (check_whole, ANY, "it is used modulo 2^32"),
  "step": (check_whole, ANY, "pass the state's count"),
  "count": (check_whole, _STEPS, "pass the number of steps so far"),
}
_SCHEDULES = ("learning_rate", "weight_decay")
_OPTIONAL = ("adam_learning_rate", "consistent_rms")


def check_hyperparameters(op: str, **values: Any) -> None:
  """Checks hyperparameters by `_RULES`; ignores the prefix `adam_` in names."""
  for name, value in values.items():
    short = name.removeprefix("adam_")
    may_be_schedule, may_be_none = short in _SCHEDULES, name in _OPTIONAL
    if may_be_schedule and callable(value) or may_be_none and value is None:
      continue
    check, allowed, remedy = _RULES[short]
    others = ["or a schedule"] * may_be_schedule + ["or None"] * may_be_none
    check(op, name, value, allowed, remedy, or_else=" ".join(others))


def check_coefficients(op: str, values: Any) -> None:
  """Raises unless `values` are three numbers, for a Newton-Schulz iteration."""
  remedy = "leave ns_coeffs out for Muon's defaults"
  if is_array(values):
    check_array(op, "ns_coeffs", values, "three numbers", ndim=1, remedy=remedy)
  elif not isinstance(values, tuple | list):
    refuse(TypeError, op, "ns_coeffs", "three numbers", values, remedy)
  if len(values) != 3:
    refuse(ValueError, op, "ns_coeffs", "three numbers", values, remedy)
  for i, value in enumerate(() if is_array(values) else values):
    check_number(op, f"ns_coeffs[{i}]", value, ANY, remedy)


def check_optimizer(op: str, name: str, tx: Any) -> None:
  """Raises a TypeError unless `tx` has both `init` and `update`."""
  if all(callable(getattr(tx, part, None)) for part in ("init", "update")):
    return
  made = callable(tx) and getattr(tx, "__name__", None)
  remedy = "pass an optax optimizer, such as optax.lion(1e-3)"
  if made:
    remedy = f"call it, as in {made}(1e-3)"
  refuse(TypeError, op, name, "an optimizer with init and update", tx, remedy)


def check_decay_mask(
  op: str, name: str, mask: Any
) -> Callable[[Any], Any] | None:
  """Wraps a mask in a function that checks it; None stays None."""
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
        f"{op}: {name} must have the structure of the parameters or a prefix "
        f"of it, got {jax.tree.structure(tree)} for "
        f"{jax.tree.structure(params)}; pass a function of the parameters"
      ) from error
    return tree

  return checked


def descend(
  op: str,
  tx: optax.GradientTransformation,
  learning_rate: Any,
  weight_decay: Any,
  mask: Any,
  *,
  prefix: str = "",
  mask_name: str = "mask",
) -> optax.GradientTransformationExtraArgs:
  """Chains `tx` with weight decay and a learning rate, after checking both."""
  numbers = {"learning_rate": learning_rate, "weight_decay": weight_decay}
  check_hyperparameters(op, **{prefix + k: x for k, x in numbers.items()})
  mask = check_decay_mask(op, prefix + mask_name, mask)
  return optax.chain(
    tx,
    _add_decayed_weights(weight_decay, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def _add_decayed_weights(
  weight_decay: Any, mask: Any
) -> optax.GradientTransformation:
  """Makes `optax.add_decayed_weights` count the steps of a schedule.

  optax 0.2.6 does not count them, so it uses the first value in every step.
  """
  tx = optax.add_decayed_weights(weight_decay, mask)
  if not callable(weight_decay):
    return tx

  def update_fn(updates, state, params=None):
    new_updates, _ = tx.update(updates, state, params)
    # The count is the only leaf of the state.
    return new_updates, jax.tree.map(optax.safe_increment, state)

  return optax.GradientTransformation(tx.init, update_fn)


def _check_bools(op: str, name: str, tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, bool | np.bool_):
      continue
    if not is_array(leaf) or leaf.dtype != bool:
      rule = "a function of the parameters or a tree of bools"
      refuse(TypeError, op, name, rule, leaf, "True decays a leaf's weights")


def check_codec(op: str, codec: Any) -> None:
  """Raises a TypeError if `codec` is not a `MomentCodec`."""
  remedy = "pass what a function in codecs returns, as in codec=codecs.coat()"
  check_kind(op, "codec", codec, MomentCodec, remedy)


def choose_leaves(
  op: str, params: Any, mask: QuantizeMask | None
) -> list[bool]:
  """Lists for each leaf whether `mask` selects it for encoding."""
  mask = default_quantize_mask if mask is None else mask
  if not callable(mask):
    raise TypeError(
      f"{op}: quantize_mask must be a function (path, leaf) -> bool, got "
      f"{mask!r}; leave it out to use default_quantize_mask"
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
    chosen = bool(mask(path, leaf))
    if chosen and jnp.issubdtype(dtype, jnp.complexfloating):
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
    out.append(chosen)
  return out


def check_gradients(
  op: str, grads: Sequence[tuple[str, Any]], name: str = "gradients"
) -> None:
  """Raises a TypeError if a gradient is neither floating nor complex."""
  for path, g in grads:
    if not is_array(g) or not jnp.issubdtype(g.dtype, jnp.inexact):
      raise TypeError(
        f"{op}: {name} must be floating or complex, got {described(g)} at "
        f"{path!r}; cast it"
      )


def gradients_like(
  op: str, updates: optax.Updates, codes: Any, name: str = "gradients"
) -> list[Array]:
  """Lists the gradients; raises unless they have the leaves of `codes`."""
  grads, wanted = leaf_paths(updates), leaf_paths(codes)
  check_gradients(op, grads, name)
  for (path, _), (wanted_path, _) in zip(grads, wanted, strict=False):
    if path != wanted_path:
      raise ValueError(
        f"{op}: {name} must have the paths of the parameters given to init, "
        f"got {path!r} for {wanted_path!r}; call init with parameters of these "
        "names"
      )
  wrong = [
    f"{g.shape} for {x.shape} at {path!r}"
    for (path, g), (_, x) in zip(grads, wanted, strict=False)
    if g.shape != x.shape
  ]
  if len(grads) != len(wanted):
    wrong = [f"{len(grads)} leaves for {len(wanted)}"]
  if wrong:
    raise ValueError(
      f"{op}: {name} must have the shapes of the parameters given to init, got "
      f"{wrong[0]}; call init with parameters of these shapes"
    )
  return [g for _, g in grads]


def promoted(op: str, updates: optax.Updates, params: optax.Params | None):
  """Casts gradients to the dtypes that their updates would have in optax."""
  if params is None:
    return updates
  grads, treedef = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=lambda x: x is None
  )
  remedy = "pass the parameters of these gradients"
  leaves = flatten_like(op, "params", params, "the gradients", treedef, remedy)
  out = []
  for (keys, g), p in zip(grads, leaves, strict=True):
    if g is not None and jnp.shape(g) != jnp.shape(p):
      raise ValueError(
        f"{op}: params must have the shapes of the gradients, got "
        f"{jnp.shape(p)} for {jnp.shape(g)} at {leaf_path(keys)!r}; {remedy}"
      )
    cast = None if g is None else jnp.asarray(g, jnp.result_type(g, p))
    out.append(cast)
  return treedef.unflatten(out)
