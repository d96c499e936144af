# SPDX-License-Identifier: Apache-2.0
"""Finds the fields in an optax state that `encoded` stores in FP8.

A field is a part of a state that has the structure and shapes of the
parameters, such as a momentum or second moments.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from coat_jax.codecs import MomentCodec
from coat_jax.numerics.checks import check_choice, check_kind
from coat_jax.optimizer.masks import node_path
from coat_jax.optimizer.state import marked_moment, placeholder_type

Kind = Literal["mu", "nu"]
FieldRule = Callable[[str], Kind | None]

# Optax's names of fields that are never negative.
_NONNEGATIVE = frozenset(
  ("nu", "nu_max", "n", "exp_avg_sq", "sum_of_squares", "grad_sum_sq")
  + ("e_g", "e_x", "step_sizes")
)
# Optax's names of copies of parameters in a state.
_PARAMETERS = frozenset(
  ("z", "x0", "params", "params0", "init_params", "init_particles", "cache")
)


def default_field_rule(path: str) -> Kind | None:
  """Decides by a field's name how `encoded` stores it by default.

  Args:
    path: the field's path in the state, such as "0/nu".

  Returns:
    "nu" for optax's names of fields that are never negative (`nu`, `nu_max`,
    `n`, `exp_avg_sq`, `sum_of_squares` and the like); None for optax's names of
    copies of parameters, such as `z` of Schedule-Free and `params0` of Prodigy;
    otherwise "mu". `encoded` leaves a field unchanged if the result is None.

  Raises:
    TypeError: `path` is not a string.

  Examples:
    >>> from coat_jax.optimizer import default_field_rule
    >>> [default_field_rule(path) for path in ("0/trace", "0/nu", "z")]
    ['mu', 'nu', None]
  """
  remedy = "pass a path in the state, such as '0/nu'"
  check_kind("default_field_rule", "path", path, str, remedy)
  name = path.rpartition("/")[-1]
  if name in _PARAMETERS:
    return None
  return "nu" if name in _NONNEGATIVE else "mu"


@functools.cache
def _known_states() -> Mapping[type, Mapping[str, Kind | None]]:
  """Maps optax's state types to the fields that `default_field_rule` misjudges.

  A field maps to None if an update would magnify its rounding errors.
  `scale_by_stddev` computes the square root of nu - mu^2, which may become
  negative if nu and mu are rounded. COCOB and MADGRAD compute parameters from
  sums over all steps.
  """
  known: dict[type, Mapping[str, Kind | None]] = {
    optax.ScaleBySM3State: {"nu": "mu"},  # Averages of updates.
    optax.contrib.SophiaState: {"nu": "mu"},  # Hessian estimates.
    optax.contrib.COCOBState: dict.fromkeys(
      ("cumulative_gradients", "scale", "subgradients", "reward")
    ),
  }
  if hasattr(optax.contrib, "MadgradState"):  # optax 0.2.6 has none.
    known[optax.contrib.MadgradState] = dict.fromkeys(("grad_sum_sq", "s"))
  for bias_correction in (False, True):
    tx = optax.scale_by_stddev(bias_correction=bias_correction)
    state = jax.eval_shape(tx.init, ())
    known[type(state)] = dict.fromkeys(("mu", "nu"))
  return known


def _checked_rule(op: str, state: Any, rule: FieldRule) -> FieldRule:
  """Wraps a rule to check its results and correct them by `_known_states`."""
  known = _known_states()
  nodes = tree_leaves_with_path(state, is_leaf=lambda x: type(x) in known)
  corrected = {
    node_path((*keys, jax.tree_util.GetAttrKey(name))): (type(node), kind)
    for keys, node in nodes
    for name, kind in known.get(type(node), {}).items()
  }

  def kind_at(path: str) -> Kind | None:
    kind: Any = rule(path)
    remedy = "return 'nu' for fields that are never negative"
    check_choice(op, "the result of fields", kind, (None, "mu", "nu"), remedy)
    if kind is None or path not in corrected:
      return kind
    owner, kind = corrected[path]
    if kind is None and rule is not default_field_rule:
      raise ValueError(
        f"{op}: fields of {owner.__name__} must stay in f32, because its "
        "update magnifies their rounding errors, got a rule that encodes "
        f"{path!r}; let fields return None for it"
      )
    return kind

  return kind_at


def mark_placeholders(
  op: str,
  init: Callable[[Any], Any],
  placeholder: Any,
  codec: MomentCodec,
  rule: FieldRule,
) -> Any:
  """Calls `init` with a placeholder; replaces fields with marked moments."""
  state, kind = init(placeholder), placeholder_type()
  kind_at, paths = _checked_rule(op, state, rule), _field_paths(init)

  def mark(keys, node):
    path = node_path(keys)
    if not isinstance(node, kind) or not (paths is None or path in paths):
      return node
    chosen = kind_at(path)
    return marked_moment(node, getattr(codec, chosen)) if chosen else node

  return jax.tree.map_with_path(
    mark,
    state,
    # Adafactor's moments are never fields, even those with a parameter's shape.
    is_leaf=lambda x: isinstance(x, kind | optax.FactoredState),
  )


def _field_paths(init: Callable[[Any], Any]) -> set[str] | None:
  """Returns the paths of fields in the state that `init` returns for a matrix.

  We need the paths because optax's placeholders also replace trees that are not
  fields, such as the norms of NovoGrad or the accumulators of SM3. Returns None
  if `init` fails, as it does if its labels or masks do not fit this matrix.
  """
  params = {"matrix": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
  try:
    state = jax.eval_shape(init, params)
  except Exception:  # Each wrapper of optax raises a different exception.
    return None
  shapes = _shapes(params)
  nodes, _ = _flatten(state, shapes)
  return {node_path(keys) for keys, node in nodes if _is_like(node, shapes)}


class Field(NamedTuple):
  """A node of a state; `kind` is None if the node is not encoded."""

  node: Any
  kind: Kind | None


def find_fields(
  op: str, state: Any, params: Any, rule: FieldRule
) -> tuple[list[Field], Any]:
  """Lists a state's nodes with their kinds; also returns its treedef."""
  shapes = _shapes(params)
  flat, treedef = _flatten(state, shapes)
  kind_at = _checked_rule(op, state, rule)
  found = []
  for keys, node in flat:
    path = node_path(keys)
    kind = kind_at(path) if _is_like(node, shapes) else None
    found.append(Field(node, kind))
    for x in jax.tree.leaves(node) if kind else ():
      if x.dtype not in (jnp.float32, jnp.complex64):
        raise ValueError(
          f"{op}: the inner optimizer must keep its fields in f32, got "
          f"{x.dtype} at {path!r}; leave its mu_dtype out, because the codec "
          "determines how fields are stored, or let fields return None for it"
        )
  if shapes and not any(field.kind for field in found):
    raise ValueError(
      f"{op}: the inner optimizer must keep a field of the parameters' "
      "structure and shapes, got a state without one to encode; use the inner "
      "optimizer without encoded, or pass fields, a rule that chooses a field"
    )
  return found, treedef


def _shapes(params: Any) -> Mapping[Any, tuple[int, ...]]:
  """Maps the path of each parameter to its shape."""
  return {keys: jnp.shape(x) for keys, x in tree_leaves_with_path(params)}


def _flatten(
  state: Any, shapes: Mapping[Any, tuple[int, ...]]
) -> tuple[list[tuple[Any, Any]], Any]:
  """Lists the nodes of a state with their paths; a whole field is one node."""
  return jax.tree_util.tree_flatten_with_path(
    state,
    is_leaf=lambda node: (
      isinstance(node, optax.FactoredState) or _is_like(node, shapes)
    ),
  )


def _is_like(node: Any, shapes: Mapping[Any, tuple[int, ...]]) -> bool:
  """Returns whether a node is a tree of floats with these paths and shapes.

  Some or even all leaves may be masked, as in `optax.partition`.
  """
  present, masked = {}, set()
  flat = tree_leaves_with_path(node, is_leaf=_is_masked)
  for keys, x in flat:
    if _is_masked(x):
      masked.add(keys)
    elif hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact):
      present[keys] = x.shape
    else:
      return False
  # A lone masked leaf is a field only if the parameters are a single array.
  if not flat or (() in masked and () not in shapes):
    return False
  return present.keys() <= shapes.keys() and all(
    present[keys] == shape
    if keys in present
    else any(keys[:i] in masked for i in range(len(keys) + 1))
    for keys, shape in shapes.items()
  )


def _is_masked(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)
