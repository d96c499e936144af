# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a model saves for its backward pass, by tracing it.

Each array that the backward pass reads counts once, even if it is also saved in
another shape. Arrays that are computed from parameters alone do not count,
because their size does not depend on the number of tokens.
"""

from typing import Any

import jax
from flax import nnx
from jax.extend.core import Var

from coat_jax.layers.residuals import name_of
from coat_jax.numerics.checks import is_array

# These operations keep their input's bytes if they do not change its size.
_ALIASES = {
  "bitcast_convert_type",
  "broadcast_in_dim",
  "copy",
  "reduce_precision",
  "reshape",
  "squeeze",
}


def saved_bytes(model: nnx.Module, inputs: tuple[Any, ...]) -> int:
  """Counts the bytes that a call saves to compute the parameters' gradients."""
  graph, params, others = nnx.split(model, nnx.Param, ...)
  leaves, tree = jax.tree.flatten(inputs)
  is_traced = [is_array(leaf) for leaf in leaves]
  arrays = [x for x, traced in zip(leaves, is_traced, strict=True) if traced]

  def residuals_of(params, others, arrays):
    found = iter(arrays)
    args = [
      next(found) if traced else leaf
      for leaf, traced in zip(leaves, is_traced, strict=True)
    ]

    def call(params):
      model = nnx.merge(graph, params, others)
      return model(*jax.tree.unflatten(tree, args))

    return jax.tree.leaves(jax.vjp(call, params)[1])

  jaxpr = jax.make_jaxpr(residuals_of)(params, others, arrays).jaxpr
  return _count(jaxpr, len(jax.tree.leaves(params)))


def _count(jaxpr: Any, num_params: int) -> int:
  params = set(jaxpr.invars[:num_params])
  equations = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
  # Arrays that are computed from parameters alone.
  fixed = set(params)
  for equation in jaxpr.eqns:
    inputs = [var for var in equation.invars if isinstance(var, Var)]
    if inputs and all(var in fixed for var in inputs):
      fixed.update(equation.outvars)
  kept: dict[Any, Any] = {}
  for var in jaxpr.outvars:
    if isinstance(var, Var) and var not in fixed:
      kept.setdefault(_original(var, equations), var.aval)
  arrays: list[Any] = list(kept.values())
  return sum(x.size * x.dtype.itemsize for x in arrays)


def _original(var: Any, equations: dict) -> Any:
  """Traces a reshaped or copied array back to its source."""
  while (equation := equations.get(var)) is not None:
    is_named = name_of(equation) is not None
    if equation.primitive.name not in _ALIASES and not is_named:
      break
    source = equation.invars[0]
    if not isinstance(source, Var):
      break
    aval: Any = source.aval
    if aval.size != var.aval.size:
      break
    var = source
  return var
