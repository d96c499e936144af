# SPDX-License-Identifier: Apache-2.0
"""How large an optimizer's state is, and how well moments fit their codes."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from coat_jax.codecs import MomentCodec
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.optimizer import moments
from coat_jax.optimizer.masks import leaf_paths
from coat_jax.optimizer.state import (
  LowBitsState,
  ScaleByCoatAdamState,
  find_states,
)
from coat_jax.qtensor import split_groups

_QUANTILES = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1}


class StateBytes(NamedTuple):
  """Size of the state of `scale_by_coat_adam` or `fused_coat_adamw`.

  Attributes:
    total: bytes of all its arrays, those of weights' low bits among them.
    parameters: values whose moments it keeps.
    bytes_per_param: total / parameters.
  """

  total: int
  parameters: int
  bytes_per_param: float


def state_bytes(opt_state: Any) -> StateBytes:
  """Counts the bytes of the coat states in an optimizer state.

  Low bits of weights (`LowBitsState`) count, for they are kept beside moments.

  Args:
    opt_state: a coat state, or any optimizer state that holds some; of arrays
      or of `jax.ShapeDtypeStruct`s, as `jax.eval_shape(solver.init, params)`
      gives them without allocating.

  Returns:
    `StateBytes`, the sum over all coat states.

  Raises:
    ValueError: it holds no coat state.

  Examples:
    >>> import jax
    >>> from coat_jax import coat_adamw, state_bytes
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    >>> size = state_bytes(jax.eval_shape(coat_adamw(1e-3).init, params))
    >>> print(f"{size.bytes_per_param:.2f}")
    2.08
  """
  states = find_states("state_bytes", opt_state, ScaleByCoatAdamState)
  parameters = sum(x.size for s in states for x in jax.tree.leaves(s.mu_codes))
  low = [
    x.low
    for x in jax.tree.leaves(opt_state, is_leaf=_is_low_bits)
    if _is_low_bits(x)
  ]
  arrays = jax.tree.leaves((states, low))
  total = sum(x.size * x.dtype.itemsize for x in arrays)
  return StateBytes(total, parameters, total / max(parameters, 1))


def _is_low_bits(node: Any) -> bool:
  return isinstance(node, LowBitsState)


def state_report(
  opt_state: Any,
  *,
  codec: MomentCodec,
  reference: optax.ScaleByAdamState | None = None,
) -> dict[str, dict[str, Any]]:
  """Reports, leaf by leaf, how well the moments fit their codes.

  Args:
    opt_state: a coat state, or an optimizer state that holds exactly one.
    codec: the codec it was made with.
    reference: moments of the same run in f32, to compare with.

  Returns:
    By path, a dict that JSON can take: `parameters`, `encoded` (False for
    leaves that stay f32), and for each of `mu` and `nu` a dict of
      `power`: min, p10, median, p90, max and mean of the expansion's k over the
        groups that are not all zero (codecs that have one);
      `codes_used`: share of the 256 codes that occur (8-bit codecs);
      `zeroed`: share of values that are 0; with a reference, that are 0 where
        it is not. A zeroed second moment divides its update by eps;
      `relative_error` (with a reference): |decoded - reference| / |reference|,
        Euclidean norms over the leaf.

  Raises:
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
  found = find_states(op, opt_state, ScaleByCoatAdamState)
  if len(found) > 1:
    raise ValueError(
      f"{op}: opt_state must hold one coat state, got {len(found)}; pass one"
    )
  (state,) = found
  paths = [path for path, _ in leaf_paths(state.mu_codes)]
  leaves = moments.flatten(moments.moment_trees(state))
  references = [(None,) * len(codec.groups)] * len(leaves)
  if reference is not None:
    pair = jax.tree.leaves(reference.mu), jax.tree.leaves(reference.nu)
    references = list(zip(*pair, strict=True))
    got = [mu.shape for mu, _ in references]
    want = [stored[0].codes.shape for stored in leaves]
    if got != want:
      raise ValueError(
        f"{op}: reference must have leaves of shapes {want}, got {got}; pass "
        "the state of Adam for the same parameters"
      )
  out = {}
  for path, stored, exact in zip(paths, leaves, references, strict=True):
    groups = moments.stored_groups(op, stored, codec.groups, codec.name)
    decoded = moments.decode(groups, stored)
    codes = stored[0].codes
    out[path] = {
      "parameters": int(codes.size),
      "encoded": moments.is_encoded(stored[0]),
    }
    for i, name in enumerate(("mu", "nu")):
      out[path][name] = _report_moment(
        groups[i], stored[i], decoded[i], exact[i]
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
