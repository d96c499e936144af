# SPDX-License-Identifier: Apache-2.0
"""Counts what a layer saves for its backward pass.

We trace `jax.vjp` of one layer, under the `jax.checkpoint` policy of `remat`,
and read off the traced program which arrays the backward pass reads. Nothing is
computed, so a layer of any width takes a fraction of a second.
  * Each array counts once, even if it is also saved in another shape.
  * Parameters and casts of them do not count: they do not grow with the tokens.
  * Scales and statistics count.

The kind of an array is the name that `coat_jax.layers` gives it for checkpoint
policies. Arrays that plain autodiff keeps (recipes bf16 and fp8_linear) have no
name: the operands of linear layers are `linear`, and any other array has the
kind of the `residual_scope` that made it.
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
# At this length, scales of whole tensors are negligible.
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

  We count the arrays of `residual_arrays` that grow with the number of tokens,
  except the positions, which all layers share. XLA differs from autodiff in two
  places: BF16 layers keep the attention's output twice, in its own layout and
  as the operand of the next product; and if LayerNorm is differentiated by
  autodiff, two of its arrays become one. The bytes are for one of `tensor` GPUs
  along the mesh's tensor axis. Each of them holds the whole residual stream of
  BF16 layers.
  """
  recipe = dataclasses.replace(recipe, axes=None)
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
  """Counts the bytes per token that one layer saves, by kind and in total.

  `tokens` is the length of the one sequence that is traced. From a few hundred
  tokens on, scales of whole tensors are negligible.
  """
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
  """Lists shape and kind of each array that one layer saves.

  Without `saves_copies`, the experts of a mixture are on several GPUs. Then it
  saves nothing that has rows for the copies of tokens.
  """
  options = {}
  if isinstance(config, ModelConfig) and config.kinds_of_layers is not None:
    options = dict(kind=jnp.int32(0))  # All kinds save the same arrays.
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
  """A traced forward pass; its results are what the backward pass reads."""

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
    """Returns shape and kind of each distinct result, without parameters."""
    kept = {}
    for var in self.jaxpr.outvars:
      if isinstance(var, Var) and not self._is_parameter(var):
        array = self._aliases(var)[-1]
        kept.setdefault(array, (var.aval, self._kind(var)))
    return list(kept.values())

  def _reached_from(self, start):
    """Returns all arrays that depend on one of these."""
    reached = set(start)
    for equation in self.jaxpr.eqns:
      if any(isinstance(v, Var) and v in reached for v in equation.invars):
        reached.update(equation.outvars)
    return reached

  def _is_parameter(self, var):
    """Returns whether var depends only on parameters, and is not a scale."""
    of_params = var in self.of_params and var not in self.of_x
    return of_params and var.aval.size > 1

  def _aliases(self, var):
    """Lists an array, then the array of which it is a reshape, and so on."""
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
      return "norm"  # The layer's input, which its first norm saves.
    kind = _kind_of_scope(equations[-1])
    if kind is None:
      raise ValueError(
        f"memory: {var.aval} is saved for the backward pass and has no kind, "
        f"got {equations[-1]}; put it through save_residual, or make it under "
        "residual_scope"
      )
    return kind


# Operations whose output shares its input's memory if the sizes are equal.
_ALIASES = {
  "bitcast_convert_type",
  "broadcast_in_dim",
  "copy",
  "reduce_precision",  # jax.checkpoint applies it to what it keeps.
  "reshape",
  "squeeze",
}


def _kind_of_scope(equation) -> str | None:
  return residuals.kind_of_scope(str(equation.source_info.name_stack))
