# SPDX-License-Identifier: Apache-2.0
"""What a layer saves for its backward pass, counted from its gradient.

The arrays are those that `jax.vjp` of one layer saves for its backward pass.
They are read off the traced program, so that nothing is computed and a layer of
any width takes a second or two:
  * each array once: a reshape of one that is kept anyway is that one;
  * parameters apart, and casts of them: they do not grow with the tokens;
  * scales and statistics included.

The kind of an array is the name that `coat_jax.layers` gives it for checkpoint
policies. Arrays that plain autodiff keeps (recipes bf16 and fp8_linear) have no
name: an operand of a linear layer is linear, any other has the kind of the
`residual_scope` that it was made in.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Var

from coat_jax.layers import residuals
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import DecoderLayer
from coat_jax.models.vision import VisionConfig, VisionLayer
from coat_jax.recipe import CoatRecipe

KINDS = get_args(residuals.Kind)


def residual_bytes(
  config: ModelConfig | VisionConfig, recipe: CoatRecipe, *, tokens: int
) -> dict[str, float]:
  """Counts what one layer saves for its backward, per token.

  Args:
    config: The shape of a decoder or of a vision tower.
    recipe: How its layers compute.
    tokens: Length of the one sequence that is traced; at some hundred, what
      does not grow with it (scales of whole tensors) no longer shows.

  Returns:
    Bytes per token and layer for each of `KINDS`, and their `total`.
  """
  totals = dict.fromkeys(KINDS, 0)
  for aval, kind in residual_arrays(config, recipe, tokens=tokens):
    totals[kind] += aval.size * aval.dtype.itemsize
  totals["total"] = sum(totals.values())
  return {kind: count / tokens for kind, count in totals.items()}


def residual_arrays(
  config: ModelConfig | VisionConfig, recipe: CoatRecipe, *, tokens: int
) -> list[tuple[jax.core.ShapedArray, str]]:
  """Lists the arrays that `residual_bytes` counts.

  Args:
    config: The model's shape.
    recipe: How its layers compute.
    tokens: Length of the one sequence that is traced.

  Returns:
    Shape with dtype, and kind, of each array.
  """
  options = {}
  if isinstance(config, VisionConfig):
    make = functools.partial(VisionLayer, config, recipe)
  else:
    make = functools.partial(DecoderLayer, config, recipe)
    if config.kinds_of_layers is not None:
      # Which kind of layer it is changes nothing of what is saved.
      options = dict(kind=jnp.int32(0))
  layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
  graph, params = nnx.split(layer)
  x = jax.ShapeDtypeStruct((1, tokens, config.d_model), jnp.bfloat16)

  def residuals_of(params, x):
    layer_of = lambda params, x: nnx.merge(graph, params)(x, **options)  # noqa: E731
    return jax.tree.leaves(jax.vjp(layer_of, params, x)[1])

  jaxpr = jax.make_jaxpr(residuals_of)(params, x).jaxpr
  return _Program(jaxpr).arrays()


class _Program:
  """A traced forward whose results are what the backward reads."""

  def __init__(self, jaxpr):
    self.jaxpr = jaxpr
    self.equation_of = {
      var: equation for equation in jaxpr.eqns for var in equation.outvars
    }
    *params, x = jaxpr.invars
    self.of_params = self._reached_from(params)
    self.of_x = self._reached_from([x])
    self.operands = {
      self._aliases(var)[-1]
      for equation in jaxpr.eqns
      if equation.primitive.name == "dot_general"
      and _kind_of_scope(equation) == "linear"
      for var in equation.invars
    }

  def arrays(self):
    """Shape and kind of each result, parameters apart, each array once."""
    kept = {}
    for var in self.jaxpr.outvars:
      if isinstance(var, Var) and not self._is_parameter(var):
        array = self._aliases(var)[-1]
        kept.setdefault(array, (var.aval, self._kind(var)))
    return list(kept.values())

  def _reached_from(self, start):
    """All arrays that depend on one of these."""
    reached = set(start)
    for equation in self.jaxpr.eqns:
      if any(isinstance(v, Var) and v in reached for v in equation.invars):
        reached.update(equation.outvars)
    return reached

  def _is_parameter(self, var):
    """Whether it depends on parameters only; scales of weights are counted."""
    of_params = var in self.of_params and var not in self.of_x
    return of_params and var.aval.size > 1

  def _aliases(self, var):
    """The array, what it is a name or a reshape of, and so on to its origin."""
    found = [var]
    while (equation := self.equation_of.get(found[-1])) is not None:
      if equation.primitive.name not in _ALIASES:
        break
      source, alias = equation.invars[0], found[-1]
      if not isinstance(source, Var) or source.aval.size != alias.aval.size:
        break
      found.append(source)
    return found

  def _kind(self, var):
    equations = [self.equation_of.get(alias) for alias in self._aliases(var)]
    for equation in equations:
      if equation is not None and equation.primitive.name == "name":
        return equation.params["name"].removeprefix("coat_")
    if self._aliases(var)[-1] in self.operands:
      return "linear"
    if equations[-1] is None:
      return "norm"  # The layer's input, which its first norm saves.
    kind = _kind_of_scope(equations[-1])
    if kind is None:
      raise ValueError(
        f"memory: {var.aval} is saved for the backward pass and has no kind, "
        f"got {equations[-1]}; put it through save_residual, or make it under "
        "residual_scope"
      )
    return kind


# Of one input, whose bytes the output shares where it has as many.
_ALIASES = {
  "bitcast_convert_type",
  "broadcast_in_dim",
  "copy",
  "name",
  "reshape",
  "squeeze",
}


def _kind_of_scope(equation) -> str | None:
  """The kind of what plain autodiff saves of an equation's results."""
  return residuals.kind_of_scope(str(equation.source_info.name_stack))
