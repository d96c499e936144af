# SPDX-License-Identifier: Apache-2.0
"""How large an optimizer's state is, and how well moments fit their codes."""

from typing import Any, NamedTuple

import jax
import numpy as np

from coat_jax.checks import refuse
from coat_jax.codecs import MomentCodec
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.optimizer import moments
from coat_jax.optimizer.fields import EncodedState
from coat_jax.optimizer.masks import leaf_path
from coat_jax.optimizer.state import (
  LowBitsState,
  MomentState,
  check_codec,
  find_states,
)
from coat_jax.optimizer.stored_fields import fields_of, stored_fields
from coat_jax.qtensor import split_groups

_QUANTILES = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1}


class StateBytes(NamedTuple):
  """Size of an optimizer's state.

  Attributes:
    total: bytes of the arrays that are counted.
    parameters: what they are divided by: the values of `params` or, without
      them, those whose moments the coat states keep.
    bytes_per_param: total / parameters.
  """

  total: int
  parameters: int
  bytes_per_param: float


def state_bytes(opt_state: Any, params: Any = None) -> StateBytes:
  """Counts the bytes of an optimizer's state, for each parameter.

  With `params` all arrays of any state of optax count, so that an optimizer can
  be compared with what `encoded` makes of it. Without them it counts the coat
  states alone, with what `encoded` leaves as it is and with the low bits of
  weights (`LowBitsState`), which are kept beside moments.

  Under `optax.masked` or `optax.partition` a coat state has moments of some
  parameters. Without `params` its bytes are divided by those alone, with
  `params` by all.

  Args:
    opt_state: a coat state, or any optimizer state that holds some; with
      `params` any; of arrays or of `jax.ShapeDtypeStruct`s, as
      `jax.eval_shape(solver.init, params)` gives them without allocating.
    params: what it is the state of, arrays or `jax.ShapeDtypeStruct`s.

  Returns:
    `StateBytes`.

  Raises:
    TypeError: a leaf of `params` is no array.
    ValueError: without `params`: it holds no coat state.

  Examples:
    >>> import jax, optax
    >>> from coat_jax import coat_adamw, state_bytes
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    >>> size = state_bytes(jax.eval_shape(coat_adamw(1e-3).init, params))
    >>> print(f"{size.bytes_per_param:.2f}")
    2.08
    >>> plain = jax.eval_shape(optax.adamw(1e-3).init, params)
    >>> print(f"{state_bytes(plain, params).bytes_per_param:.2f}")
    8.00
  """
  if params is not None:
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
      if not hasattr(leaf, "size"):
        remedy = "pass the parameters, or leave params out"
        refuse(TypeError, "state_bytes", "params", "arrays", leaf, remedy)
    parameters = sum(x.size for x in leaves)
    return _state_bytes(opt_state, parameters)
  states = find_states(
    "state_bytes",
    opt_state,
    MomentState | EncodedState,
    ", or pass params, with which any state is counted",
  )
  parameters = sum(_parameters(state) for state in states)
  low = [
    x.low
    for x in jax.tree.leaves(opt_state, is_leaf=_is_low_bits)
    if _is_low_bits(x)
  ]
  return _state_bytes((states, low), parameters)


def _state_bytes(arrays: Any, parameters: int) -> StateBytes:
  leaves = [x for x in jax.tree.leaves(arrays) if hasattr(x, "dtype")]
  total = sum(x.size * x.dtype.itemsize for x in leaves)
  return StateBytes(total, parameters, total / max(parameters, 1))


def _parameters(state: MomentState | EncodedState) -> int:
  if isinstance(state, EncodedState):
    leaves = stored_fields(state.inner).leaves.values()
    return sum(stored[0].codes.size for stored in leaves)
  return sum(x.size for x in jax.tree.leaves(moments.moment_trees(state)[0]))


def _is_low_bits(node: Any) -> bool:
  return isinstance(node, LowBitsState)


def state_report(
  opt_state: Any,
  *,
  codec: MomentCodec,
  reference: Any = None,
) -> dict[str, dict[str, Any]]:
  """Reports, leaf by leaf, how well the moments fit their codes.

  Args:
    opt_state: a coat state or an `EncodedState`, or an optimizer state that
      holds exactly one of them.
    codec: the codec it was made with.
    reference: moments of the same run in f32, to compare with: the state of
      optax's optimizer of this kind, or of the one that is encoded.

  Returns:
    By path, a dict that JSON can take: `parameters`, `encoded` (False for
    leaves that stay f32), and for each of `mu` and `nu`, or each encoded field
    by its path, a dict of
      `power`: min, p10, median, p90, max and mean of the expansion's k over the
        groups that are not all zero (codecs that have one);
      `codes_used`: share of the 256 codes that occur (8-bit codecs);
      `zeroed`: share of values that are 0; with a reference, that are 0 where
        it is not. A zeroed second moment divides its update by eps;
      `relative_error` (with a reference): |decoded - reference| / |reference|,
        Euclidean norms over the leaf.

  Raises:
    TypeError: `codec` is not a `MomentCodec`; `reference` has no such moments.
    ValueError: not exactly one coat state, or one of another codec, or a
      reference of other leaves.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_adamw, codecs, state_report
    >>> codec = codecs.coat()
    >>> state = coat_adamw(1e-3, codec=codec).init({"w": jnp.ones((64, 128))})
    >>> report = state_report(state, codec=codec)
    >>> report["w"]["encoded"], report["w"]["nu"]["zeroed"]
    (True, 1.0)
  """
  op = "state_report"
  check_codec(op, codec)
  found = find_states(op, opt_state, MomentState | EncodedState)
  if len(found) > 1:
    raise ValueError(
      f"{op}: opt_state must hold one coat state, got {len(found)}; pass one"
    )
  (state,) = found
  if isinstance(state, EncodedState):
    inner = state.inner
  else:
    inner = fields_of(state)
    if reference is not None:
      if missing := [name for name in inner if not hasattr(reference, name)]:
        raise TypeError(
          f"{op}: reference must have the moments {', '.join(inner)}, got a "
          f"{type(reference).__name__} without {missing[0]}; pass the state of "
          "optax's optimizer of this kind, as in adam_state[0]"
        )
      reference = {name: getattr(reference, name) for name in inner}
  fields = stored_fields(inner)
  references = None
  if reference is not None:
    trees = fields.plain_fields(op, "reference", reference)
    references = [jax.tree.leaves(tree) for tree in trees]
  groups = fields.groups(op, codec)
  decoded = [jax.tree.leaves(tree) for tree in fields.decode(groups)]
  out = {}
  rows = zip(fields.rows.items(), fields.leaves.values(), groups, strict=True)
  for (keys, row), stored, chosen in rows:
    leaf = out[leaf_path(keys)] = {
      "parameters": int(stored[0].codes.size),
      "encoded": moments.is_encoded(stored[0]),
    }
    for (j, i), encoded, group in zip(row, stored, chosen, strict=True):
      exact = None if references is None else references[j][i]
      leaf[fields.paths[j]] = _report_moment(
        group, encoded, decoded[j][i], exact
      )
  return out


def _report_moment(group: GroupCodec, encoded: Encoded, decoded, exact) -> dict:
  values = _in_f64(decoded)
  report = {}
  if isinstance(group, ExpandedFP8):
    powers = np.asarray(group.power(encoded.amax, encoded.range), np.float64)
    occupied = np.any(split_groups(decoded, group.group_size) != 0, axis=-1)
    powers = powers[np.asarray(occupied)]
    if powers.size:
      report["power"] = {
        name: float(np.quantile(powers, q)) for name, q in _QUANTILES.items()
      }
      report["power"]["mean"] = float(powers.mean())
  if encoded.codes.dtype.itemsize == 1:
    codes = np.asarray(encoded.codes).view(np.uint8)
    report["codes_used"] = len(np.unique(codes)) / 256
  if exact is None:
    report["zeroed"] = _share(values == 0)
    return report
  exact = _in_f64(exact)
  report["zeroed"] = _share((values == 0) & (exact != 0))
  norm = np.linalg.norm(exact)
  error = np.linalg.norm(values - exact)
  report["relative_error"] = float(error / norm) if norm else float(error)
  return report


def _in_f64(x) -> np.ndarray:
  x = np.asarray(x)
  return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _share(chosen: np.ndarray) -> float:
  """The share that is True; none of nothing."""
  return float(np.count_nonzero(chosen) / max(chosen.size, 1))
