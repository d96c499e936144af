# SPDX-License-Identifier: Apache-2.0
"""Traces a model to find the arrays that it saves for its backward pass.

Each array that the backward pass reads counts once, even if it is also saved in
another shape. Arrays that are computed from parameters alone do not count,
because their size does not depend on the number of tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Var

from coat_jax.layers.residuals import name_of
from coat_jax.numerics.checks import is_array

# Operations whose output is an alias of their input if both sizes are equal.
_ALIASES = {
  "bitcast_convert_type",
  "broadcast_in_dim",
  "copy",
  "reduce_precision",  # jax.checkpoint applies this to arrays that it keeps.
  "reshape",
  "squeeze",
}


def saved_bytes(model: nnx.Module, inputs: tuple[Any, ...]) -> int:
  """Counts the bytes that a call saves to compute the parameters' gradients."""
  graph, params, others = nnx.split(model, nnx.Param, ...)
  leaves, tree = jax.tree.flatten(inputs)
  is_traced = [is_array(leaf) for leaf in leaves]
  arrays = [x for x, traced in zip(leaves, is_traced, strict=True) if traced]

  def backward_of(params, others, arrays):
    found = iter(arrays)
    args = [
      next(found) if traced else leaf
      for leaf, traced in zip(leaves, is_traced, strict=True)
    ]

    def call(params):
      model = nnx.merge(graph, params, others)
      return model(*jax.tree.unflatten(tree, args))

    return jax.vjp(call, params)[1]

  saved = SavedArrays(backward_of, params, others, arrays).variables()
  return sum(var.aval.size * var.aval.dtype.itemsize for var in saved)


class SavedArrays:
  """The arrays that a traced function saves for its backward pass."""

  def __init__(self, backward_of: Callable, params: Any, *inputs: Any):
    """Traces a function that returns the backward pass, as `jax.vjp` does."""
    trace = jax.make_jaxpr(lambda *args: jax.tree.leaves(backward_of(*args)))
    self.jaxpr: Any = trace(params, *inputs).jaxpr
    self.equation_of: dict[Any, Any] = {
      var: equation for equation in self.jaxpr.eqns for var in equation.outvars
    }
    count = len(jax.tree.leaves(params))
    self._of_params = self._reached_from(self.jaxpr.invars[:count])
    self._of_inputs = self._reached_from(self.jaxpr.invars[count:])

  def variables(self) -> list[Any]:
    """Returns one variable for each distinct saved array, except parameters."""
    kept: dict[Any, Any] = {}
    for var in self.jaxpr.outvars:
      if isinstance(var, Var) and not self._is_parameter(var):
        kept.setdefault(self.aliases(var)[-1], var)
    return list(kept.values())

  def aliases(self, var: Any) -> list[Any]:
    """Lists an array, the array that it is an alias of, and so on."""
    found = [var]
    while (equation := self.equation_of.get(found[-1])) is not None:
      is_named = name_of(equation) is not None
      if equation.primitive.name not in _ALIASES and not is_named:
        break
      source = equation.invars[0]
      if not isinstance(source, Var):
        break
      aval: Any = source.aval
      if aval.size != found[-1].aval.size:
        break
      found.append(source)
    return found

  def _reached_from(self, start: Iterable[Any]) -> set[Any]:
    """Returns the arrays in `start` and all arrays that depend on them."""
    reached = set(start)
    for equation in self.jaxpr.eqns:
      if any(isinstance(v, Var) and v in reached for v in equation.invars):
        reached.update(equation.outvars)
    return reached

  def _is_parameter(self, var: Any) -> bool:
    """Returns whether `var` depends on parameters, but not on inputs."""
    return var in self._of_params and var not in self._of_inputs
