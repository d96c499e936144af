# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a layer saves for its backward pass.

We trace `jax.vjp` of one layer, under the `jax.checkpoint` policy of `remat`.
Then we count the arrays in the traced program that the backward pass reads.
Tracing computes nothing, so this takes a fraction of a second for any layer
width.

The kind of an array is the name that `coat_jax.layers` gives it for checkpoint
policies. Arrays that plain autodiff saves (recipes bf16 and fp8_linear) have no
name. They get these kinds:
  * operands of linear layers: `linear`;
  * the input of the whole layer: `norm`;
  * all other arrays: the kind of the `residual_scope` that computes them.
"""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.layers import residuals
from coat_jax.layers.count import SavedArrays
from coat_jax.models import VisionConfig
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.layer import TransformerLayer
from coat_jax.models.remat import checkpointed
from coat_jax.recipes import CoatRecipe

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

  The result is for one of `tensor` GPUs along the mesh's tensor axis. With the
  `bf16` recipe and without remat fp8_layer, each of these GPUs stores the whole
  residual stream; otherwise, each stores only its part. Scalars are not
  counted, nor are positions, which all layers share.
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
    options = dict(kind=jnp.int32(0))  # Layers of all kinds save the same.
  layer = nnx.eval_shape(
    lambda: TransformerLayer(config, recipe, rngs=nnx.Rngs(0))
  )
  graph, params = nnx.split(layer)
  x = jax.ShapeDtypeStruct((1, tokens, config.d_model), jnp.bfloat16)
  run = lambda x, layer: layer(x, **options)  # noqa: E731
  run = checkpointed(run, remat, recipe, is_gathering=False)

  def backward_of(params, x):
    layer_of = lambda params, x: run(x, nnx.merge(graph, params))  # noqa: E731
    return jax.vjp(layer_of, params, x)[1]

  saved = SavedArrays(backward_of, params, x)
  operands = {
    saved.aliases(var)[-1]
    for equation in saved.jaxpr.eqns
    if equation.primitive.name == "dot_general"
    and _kind_of_scope(equation) == "linear"
    for var in equation.invars
  }
  arrays = [
    (var.aval, _kind_of(var, saved, operands)) for var in saved.variables()
  ]
  if saves_copies:
    return arrays
  copies = tokens * config.experts_per_token  # pyright: ignore
  return [
    (aval, kind)
    for aval, kind in arrays
    if kind != "activation" and aval.shape[:1] != (copies,)
  ]


def _kind_of(var, saved: SavedArrays, operands: set) -> str:
  """Returns a saved array's kind; `operands` are those of linear layers."""
  aliases = saved.aliases(var)
  equations = [saved.equation_of.get(alias) for alias in aliases]
  for equation in equations:
    if equation is not None and (name := residuals.name_of(equation)):
      return name.removeprefix("coat_")
  if aliases[-1] in operands:
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


def _kind_of_scope(equation) -> str | None:
  return residuals.kind_of_scope(str(equation.source_info.name_stack))
