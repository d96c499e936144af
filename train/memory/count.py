# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a layer saves for its backward pass.

We trace `jax.vjp` of one layer, under the `jax.checkpoint` policy of `remat`,
and find the arrays in the traced program that the backward pass reads. Tracing
computes nothing, so counting takes a fraction of a second for any layer width.
  * Each array counts once, even if it is also saved in another shape.
  * Parameters and casts of parameters do not count, because their size does not
    grow with the number of tokens.
  * Scales and statistics count.

The kind of an array is the name that `coat_jax.layers` gives it for checkpoint
policies. Arrays that plain autodiff saves (recipes bf16 and fp8_linear) have no
name. Among them, operands of linear layers have the kind `linear`, and the
input of the whole layer has `norm`. Others get the kind of the
`residual_scope` that encloses them.
"""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Var

from coat_jax.layers import residuals
from coat_jax.models import VisionConfig
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.layer import TransformerLayer
from coat_jax.models.remat import checkpointed
from coat_jax.numerics.recipes import CoatRecipe

KINDS = get_args(residuals.Kind)
# The length of the traced sequence.
_TOKENS = 256


@functools.lru_cache
def saved_bytes(
  config: ModelConfig | VisionConfig,
  recipe: CoatRecipe,
  *,
  remat: Remat = "none",
  tensor: int = 1,
  saves_copies: bool = True,
) -> float:
  """Counts the bytes per token and layer that XLA keeps for the backward pass.

  The result is for one of `tensor` GPUs along the mesh's tensor axis. In recipe
  bf16, each of these GPUs stores the whole residual stream. In other recipes,
  and with remat fp8_layer, each stores only a part of it. Scalars do not count,
  nor do positions, which all layers share.
  """
  arrays = [
    (aval, kind)
    for aval, kind in residual_arrays(
      config,
      recipe,
      tokens=_TOKENS,
      remat=remat,
      saves_copies=saves_copies,
    )
    if aval.ndim and kind != "rope"
  ]
  is_whole = recipe.linear == "bf16" and remat != "fp8_layer"
  stream = _TOKENS * config.d_model
  total = 0.0
  for aval, kind in arrays:
    is_stream = aval.size == stream and kind != "attention"
    parts = 1 if is_whole and is_stream else tensor
    total += aval.size * aval.dtype.itemsize / parts / _TOKENS
  if remat != "none":
    return total
  # XLA keeps attention's output twice: in attention's layout, and as the
  # operand of the next matmul. XLA merges the two arrays of each LayerNorm.
  if recipe.linear == "bf16":
    total += 2 * config.num_heads * config.head_width / tensor
  if recipe.nonlinear == "bf16" and config.choices.norm == "layer":
    total -= 2 * 4 * config.d_model / (1 if is_whole else tensor)
  return total


def residual_bytes(
  config: ModelConfig | VisionConfig,
  recipe: CoatRecipe,
  *,
  tokens: int,
  saves_copies: bool = True,
) -> dict[str, float]:
  """Counts the bytes per token that one layer saves, by kind and in total."""
  totals = dict.fromkeys(KINDS, 0)
  arrays = residual_arrays(
    config, recipe, tokens=tokens, saves_copies=saves_copies
  )
  for aval, kind in arrays:
    totals[kind] += aval.size * aval.dtype.itemsize
  totals["total"] = sum(totals.values())
  return {kind: count / tokens for kind, count in totals.items()}


def residual_arrays(
  config: ModelConfig | VisionConfig,
  recipe: CoatRecipe,
  *,
  tokens: int,
  remat: Remat = "none",
  saves_copies: bool = True,
) -> list[tuple[jax.core.ShapedArray, str]]:
  """Lists the shape and the kind of each array that one layer saves.

  Set `saves_copies` to False if the experts of an MoE layer are distributed
  over GPUs. The layer then saves no arrays with a row for each copy of a token.
  """
  recipe = dataclasses.replace(recipe, axes=None)  # Trace for one device.
  options = {}
  if isinstance(config, ModelConfig) and config.kinds_of_layers is not None:
    options = dict(kind=jnp.int32(0))  # All kinds of layers save the same.
  layer = nnx.eval_shape(
    lambda: TransformerLayer(config, recipe, rngs=nnx.Rngs(0))
  )
  graph, params = nnx.split(layer)
  x = jax.ShapeDtypeStruct((1, tokens, config.d_model), jnp.bfloat16)
  run = lambda x, layer: layer(x, **options)  # noqa: E731
  run = checkpointed(run, remat, recipe, is_gathering=False)

  def residuals_of(params, x):
    layer_of = lambda params, x: run(x, nnx.merge(graph, params))  # noqa: E731
    return jax.tree.leaves(jax.vjp(layer_of, params, x)[1])

  jaxpr = jax.make_jaxpr(residuals_of)(params, x).jaxpr
  arrays = _Program(jaxpr).arrays()
  if saves_copies:
    return arrays
  copies = tokens * config.experts_per_token  # pyright: ignore
  return [
    (aval, kind)
    for aval, kind in arrays
    if kind != "activation" and aval.shape[:1] != (copies,)
  ]


class _Program:
  """A traced forward pass whose results are the arrays that a layer saves."""

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
    """Returns the shape and kind of each distinct result, except parameters."""
    kept = {}
    for var in self.jaxpr.outvars:
      if isinstance(var, Var) and not self._is_parameter(var):
        array = self._aliases(var)[-1]
        kept.setdefault(array, (var.aval, self._kind(var)))
    return list(kept.values())

  def _reached_from(self, start):
    """Returns the arrays in `start` and all arrays that depend on them."""
    reached = set(start)
    for equation in self.jaxpr.eqns:
      if any(isinstance(v, Var) and v in reached for v in equation.invars):
        reached.update(equation.outvars)
    return reached

  def _is_parameter(self, var):
    """Returns whether `var` depends only on parameters and is not a scale."""
    of_params = var in self.of_params and var not in self.of_x
    return of_params and var.aval.size > 1

  def _aliases(self, var):
    """Lists an array, the array that it is an alias of, and so on."""
    found = [var]
    while (equation := self.equation_of.get(found[-1])) is not None:
      is_named = residuals.name_of(equation) is not None
      if equation.primitive.name not in _ALIASES and not is_named:
        break
      source, alias = equation.invars[0], found[-1]
      if not isinstance(source, Var) or source.aval.size != alias.aval.size:
        break
      found.append(source)
    return found

  def _kind(self, var):
    equations = [self.equation_of.get(alias) for alias in self._aliases(var)]
    for equation in equations:
      if equation is not None and (name := residuals.name_of(equation)):
        return name.removeprefix("coat_")
    if self._aliases(var)[-1] in self.operands:
      return "linear"
    if equations[-1] is None:
      return "norm"  # The layer's input, which the first norm saves.
    kind = _kind_of_scope(equations[-1])
    if kind is None:
      raise ValueError(
        f"memory: every array that is saved for the backward pass must have a "
        f"kind, got {var.aval} without one; pass it to save_residual, or "
        f"compute it under residual_scope: {equations[-1]}"
      )
    return kind


# Operations whose output is an alias of their input if both sizes are equal.
_ALIASES = {
  "bitcast_convert_type",
  "broadcast_in_dim",
  "copy",
  "reduce_precision",  # jax.checkpoint applies this to arrays that it keeps.
  "reshape",
  "squeeze",
}


def _kind_of_scope(equation) -> str | None:
  return residuals.kind_of_scope(str(equation.source_info.name_stack))
