# SPDX-License-Identifier: Apache-2.0
"""Reports the memory of an optimizer state, and the error of its moments."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from coat_jax.codecs.factored import Factored
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.numerics.checks import refuse
from coat_jax.numerics.formats import array_bytes
from coat_jax.numerics.qtensor import split_groups
from coat_jax.optimizer.boxes import last_names
from coat_jax.optimizer.conversion import decode_moment, pair_nodes
from coat_jax.optimizer.masks import is_encoded, leaf_path, leaf_paths
from coat_jax.optimizer.state import (
  EncodedState,
  LowBitsState,
  check_values,
  find_states,
  is_moment,
  is_state,
  moments_in,
)
from coat_jax.optimizer.weights import StochasticRoundingState

_QUANTILES = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1}


class StateBytes(NamedTuple):
  """The size of an optimizer's state.

  `total` is in bytes; `bytes_per_param` is `total` divided by `parameters`.
  """

  total: int
  parameters: int
  bytes_per_param: float


def state_bytes(opt_state: Any, params: Any = None) -> StateBytes:
  """Counts the bytes of an optimizer's state, in total and per parameter.

  If `params` is passed, all arrays of any optax state are counted. Otherwise
  only states of this library ("coat states") are counted, including fields that
  `encoded` leaves unchanged and the low bits of weights. The average is then
  over the parameters that have moments in these states.

  Args:
    opt_state: an optimizer's state, with arrays or `jax.ShapeDtypeStruct`s, for
      example `jax.eval_shape(solver.init, params)`.
    params: the parameters of this state, arrays or `jax.ShapeDtypeStruct`s.

  Returns:
    `StateBytes`.

  Raises:
    TypeError: a leaf of `params` is not an array.
    ValueError: `params` is None and `opt_state` contains no coat state.

  Examples:
    >>> import jax, optax
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import state_bytes
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
  remedy = ", or pass params, to count any state"
  states = find_states("state_bytes", opt_state, remedy)
  parameters = 0
  for state in states:
    sizes = {}  # Moments with equal paths belong to one parameter.
    for moment in moments_in(state):
      paths = tree_leaves_with_path(moment.codes)
      for (keys, _), shape in zip(paths, moment.shapes(), strict=True):
        sizes[keys] = math.prod(shape)
    parameters += sum(sizes.values())
  kinds = LowBitsState | StochasticRoundingState
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
  low = [x.low for x in nodes if isinstance(x, kinds)]
  return _state_bytes((states, low), parameters)


def _state_bytes(arrays: Any, parameters: int) -> StateBytes:
  leaves = [x for x in jax.tree.leaves(arrays) if hasattr(x, "dtype")]
  total = sum(array_bytes(x.shape, x.dtype) for x in leaves)
  return StateBytes(total, parameters, total / max(parameters, 1))


def state_report(
  opt_state: Any, *, reference: Any = None
) -> dict[str, dict[str, Any]]:
  """Reports for each parameter how accurately codes represent its moments.

  Args:
    opt_state: an optimizer state that contains exactly one state of this
      library ("coat state"), such as the state of `coat_adamw`. For
      `coat_muon`, pass `state.inner_states["muon"]` or `["adam"]`.
    reference: exact moments to compare with: the f32 state of the corresponding
      optax optimizer from the same run. It may be part of a larger state, such
      as that of `optax.adamw`, if the larger state contains no second one. For
      `encoded`, pass the state of the inner optimizer alone.

  Returns:
    A dict that JSON can store. It maps each leaf's path to a dict with
    `parameters`, `encoded` (False for leaves stored unencoded), and for each
    moment (`mu`, `nu` or the path of an encoded field) a dict with
      `replicated`: a sentence, present only if a flax box shards codes, but not
        statistics, along their last axis. This happens if devices cannot split
        the groups evenly, or if no mesh was known when the state was made;
      `power`: min, p10, median, p90, max and mean of the expansion's k over all
        groups with a nonzero value (only for codecs with an expansion, and if
        there are such groups);
      `codes_used`: fraction of the 256 codes (16 for int4) that occur (only for
        codecs with at most 8 bits);
      `zeroed`: fraction of values that are 0 (with a reference, fraction of
        values that are 0 although the reference is not). If a second moment is
        0, a small gradient in the next step leads to a huge update;
      `relative_error` (with a reference): |decoded - reference| / |reference|,
        with Euclidean norms over the leaf; |decoded| if the reference is 0.

  Raises:
    TypeError: `opt_state` contains shapes instead of arrays; `reference` does
      not contain the moments of `opt_state`.
    ValueError: `opt_state` does not contain exactly one coat state, or the
      reference belongs to other parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import state_report
    >>> state = coat_adamw(1e-3).init({"w": jnp.ones((64, 128))})
    >>> report = state_report(state)
    >>> report["w"]["encoded"], report["w"]["nu"]["zeroed"]
    (True, 1.0)
  """
  op = "state_report"
  found = find_states(op, opt_state)
  if len(found) > 1:
    nodes = tree_leaves_with_path(opt_state, is_leaf=is_state)
    places = [f"opt_state{keystr(path)}" for path, x in nodes if is_state(x)]
    raise ValueError(
      f"{op}: opt_state must contain one coat state, got {len(found)}; pass "
      f"one of {', '.join(places)}"
    )
  (state,) = found
  if isinstance(state, EncodedState):
    inner = state.inner
  else:
    inner = state._asdict()
    del inner["count"]
    if reference is not None:
      reference = _moments_named(op, list(inner), reference)
  nodes = tree_leaves_with_path(inner, is_leaf=is_moment)
  exact = [None] * len(nodes)
  if reference is not None:
    exact = [want for _, want in pair_nodes(op, "reference", inner, reference)]
  check_values(op, found, "pass the state of a run")
  out: dict[str, dict[str, Any]] = {}
  for (place, moment), wanted in zip(nodes, exact, strict=True):
    if not is_moment(moment):
      continue
    leaves = moment.leaves()
    rows = zip(
      leaf_paths(moment.codes),
      leaves,
      jax.tree.leaves(decode_moment(moment)),
      jax.tree.leaves(wanted) or [None] * len(leaves),
      last_names(moment.codes),
      last_names(moment.amax),
      strict=True,
    )
    for (path, codes), encoded, values, want, name, kept in rows:
      leaf = out.setdefault(
        path,
        {"parameters": int(values.size), "encoded": is_encoded(encoded)},
      )
      codec = moment.codec_of(encoded)
      report = _report_moment(codec, encoded, values, want)
      is_grouped = encoded.amax.ndim > 0 and not isinstance(codec, Factored)
      if is_grouped and name is not None and kept is None:
        report["replicated"] = (
          f"statistics are replicated along {name!r}, which shards codes: "
          f"{codes.shape[-1]} columns are {encoded.amax.shape[-1]} groups"
        )
      leaf[leaf_path(place)] = report
  return out


def _moments_named(op: str, names: list[str], reference: Any) -> dict[str, Any]:
  """Finds the one node of `reference` that has these moments."""

  def has_moments(node):
    return all(hasattr(node, name) for name in names)

  nodes = jax.tree.leaves(reference, is_leaf=has_moments)
  found = [node for node in nodes if has_moments(node)]
  if len(found) != 1:
    raise TypeError(
      f"{op}: reference must contain one state with the moments "
      f"{', '.join(names)}, got {len(found)} in a {type(reference).__name__}; "
      "pass the state of optax's optimizer of this kind"
    )
  return {name: getattr(found[0], name) for name in names}


def _report_moment(group: GroupCodec, encoded: Encoded, decoded, exact) -> dict:
  values = _in_f64(decoded)
  report = {}
  if isinstance(group, ExpandedFP8):
    powers = np.asarray(group.power(encoded.amax, encoded.range), np.float64)
    # On explicit axes, JAX cannot split the rows of `decoded` into groups if
    # devices split a group; the rows of `values` are on this host.
    grouped = split_groups(jnp.asarray(values), group.group_size)
    powers = powers[np.any(grouped != 0, axis=-1)]
    if powers.size:
      report["power"] = {
        name: float(np.quantile(powers, q)) for name, q in _QUANTILES.items()
      }
      report["power"]["mean"] = float(powers.mean())
  bits = array_bytes((8,), encoded.codes.dtype)
  if bits <= 8 and not isinstance(group, Factored):
    codes = np.asarray(encoded.codes).view(np.uint8)
    report["codes_used"] = len(np.unique(codes)) / 2**bits
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
  """Returns the fraction of values that are True; 0 for an empty array."""
  return float(np.count_nonzero(chosen) / max(chosen.size, 1))
