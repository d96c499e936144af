# SPDX-License-Identifier: Apache-2.0
"""What one can do with a state of `optax_coat` besides training with it.

Switch a run between `optax.adamw` and `coat_adamw` in its middle, count the
state's bytes, and report how well the moments fit their codes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from coat_jax import stochastic
from coat_jax.codecs import MomentCodec
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.optax_coat import ScaleByCoatAdamState
from coat_jax.optimizer import moments
from coat_jax.optimizer.moments import QuantizeMask
from coat_jax.qtensor import split_groups

_QUANTILES = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1}


class StateBytes(NamedTuple):
  """Size of the state of `scale_by_coat_adam`.

  Attributes:
    total: bytes of all its arrays.
    parameters: values whose moments it keeps.
    bytes_per_param: total / parameters.
  """

  total: int
  parameters: int
  bytes_per_param: float


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
    ValueError: it holds no coat state, or one of another codec.
  """
  op = "to_adam_state"

  def convert(state):
    mus, nus = [], []
    for leaf in moments.flatten(state[1:]):
      groups = moments.stored_groups(op, leaf, codec)
      mu, nu = moments.decode(groups, leaf)
      mus.append(mu)
      nus.append(nu)
    treedef = jax.tree.structure(state.mu_codes)
    # Donation takes no buffer twice: the count is a copy.
    return optax.ScaleByAdamState(
      jnp.array(state.count), treedef.unflatten(mus), treedef.unflatten(nus)
    )

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
    codec: how the moments shall rest.
    quantize_mask: as for `scale_by_coat_adam`.
    seed: of the random words of stochastic rounding.

  Returns:
    The same tree with coat states.

  Raises:
    TypeError: a leaf is not real floating.
    ValueError: it holds no state of Adam.
  """
  op = "from_adam_state"

  def convert(state):
    choice = moments.choose_groups(op, state.mu, codec, quantize_mask)
    leaves = zip(
      choice, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True
    )
    resting = []
    for i, (groups, mu, nu) in enumerate(leaves):
      key = stochastic.leaf_key(seed, state.count, i)
      mu, nu = (jnp.array(x, jnp.float32) for x in (mu, nu))
      resting.append(moments.encode(groups, mu, nu, key))
    fields = moments.unflatten(moments.fields_like(state.mu), resting)
    return ScaleByCoatAdamState(jnp.array(state.count), *fields)

  return _convert(op, convert, opt_state, optax.ScaleByAdamState)


def state_bytes(opt_state: Any) -> StateBytes:
  """Counts the bytes of the coat states in an optimizer state.

  Args:
    opt_state: a coat state, or any optimizer state that holds some; of arrays
      or of `jax.ShapeDtypeStruct`s, as `jax.eval_shape(solver.init, params)`
      gives them without allocating.

  Returns:
    `StateBytes`, the sum over all coat states.

  Raises:
    ValueError: it holds no coat state.
  """
  states = _find("state_bytes", opt_state, ScaleByCoatAdamState)
  parameters = sum(x.size for s in states for x in jax.tree.leaves(s.mu_codes))
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
  return StateBytes(total, parameters, total / max(parameters, 1))


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
  """
  op = "state_report"
  found = _find(op, opt_state, ScaleByCoatAdamState)
  if len(found) > 1:
    raise ValueError(
      f"{op}: opt_state must hold one coat state, got {len(found)}; pass one"
    )
  (state,) = found
  paths = [path for path, _ in moments.leaf_paths(state.mu_codes)]
  leaves = moments.flatten(state[1:])
  references = [(None, None)] * len(leaves)
  if reference is not None:
    pair = jax.tree.leaves(reference.mu), jax.tree.leaves(reference.nu)
    references = list(zip(*pair, strict=True))
    got = [mu.shape for mu, _ in references]
    want = [leaf.mu.codes.shape for leaf in leaves]
    if got != want:
      raise ValueError(
        f"{op}: reference must have leaves of shapes {want}, got {got}; pass "
        "the state of Adam for the same parameters"
      )
  out = {}
  for path, leaf, true in zip(paths, leaves, references, strict=True):
    groups = moments.stored_groups(op, leaf, codec)
    decoded = moments.decode(groups, leaf)
    out[path] = {
      "parameters": int(leaf.mu.codes.size),
      "encoded": leaf.mu.codes.dtype != jnp.float32,
      "mu": _report_moment(groups.mu, leaf.mu, decoded[0], true[0]),
      "nu": _report_moment(groups.nu, leaf.nu, decoded[1], true[1]),
    }
  return out


def _report_moment(group: GroupCodec, encoded: Encoded, decoded, true):
  values = np.asarray(decoded, np.float64)
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
  if true is None:
    report["zeroed"] = float(np.mean(values == 0))
    return report
  true = np.asarray(true, np.float64)
  report["zeroed"] = float(np.mean((values == 0) & (true != 0)))
  norm = np.linalg.norm(true)
  error = np.linalg.norm(values - true)
  report["relative_error"] = float(error / norm) if norm else float(error)
  return report


def _find(op: str, opt_state: Any, kind: type) -> list[Any]:
  leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
  found = [leaf for leaf in leaves if isinstance(leaf, kind)]
  if not found:
    raise ValueError(
      f"{op}: the optimizer state must hold a {kind.__name__}, got "
      f"{type(opt_state).__name__} without one; pass what init or update of "
      f"{'coat_adamw' if kind is ScaleByCoatAdamState else 'optax.adamw'} gave"
    )
  return found


def _convert(op: str, convert, opt_state: Any, kind: type) -> Any:
  _find(op, opt_state, kind)
  return jax.tree.map(
    lambda x: convert(x) if isinstance(x, kind) else x,
    opt_state,
    is_leaf=lambda x: isinstance(x, kind),
  )
