# SPDX-License-Identifier: Apache-2.0
"""Operands of FP8 products, quantized as the recipe says.

With one scale per tensor codes serve both directions: rows for the product with
a weight, and the same transposed for the weight's gradient. In blocks of 128
rows are quantized along features and columns along tokens. So of an input the
codes that the forward read are saved, and its columns are quantized from those
in the backward; a gradient, which is there in BF16, is quantized twice.
"""

from typing import Any

from jax import Array

from coat_jax import ops
from coat_jax.layers.mesh.collectives import scale_axes
from coat_jax.layers.residuals import save_residual
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipe import CoatRecipe


def quantized(
  x: Array,
  recipe: CoatRecipe,
  *,
  layout: ops.Layout = "rows",
  scale: Array | None = None,
) -> Operand:
  """[..., n] as an operand in `recipe.formats.values`.

  Args:
    x: BF16 or f32.
    recipe: its scaling, formats and implementation.
    layout: what products read.
    scale: that `scale_of` gave of the same values; None for just in time.
  """
  how: Any = dict(
    dtype=recipe.formats.values,
    layout=layout,
    implementation=recipe.implementation,
  )
  if recipe.scaling == "block":
    return ops.quantize_blocks(x, **how)
  axis_names = scale_axes(recipe.axes)
  return ops.quantize_tensor(x, scale=scale, axis_names=axis_names, **how)


def scale_of(x: Operand) -> Array | None:
  """What is saved of an operand that the backward quantizes again.

  None in blocks, whose scales are found where codes are.
  """
  if isinstance(x.scale, BlockScales):
    return None
  return save_residual("linear", x.scale)


def input_operand(x: Array, recipe: CoatRecipe) -> tuple[Operand, Operand]:
  """Rows that a product reads, and what is saved for `columns_of`."""
  if recipe.scaling == "block":
    kept = save_residual("linear", quantized(x, recipe))
    return kept, kept
  x_q = quantized(x, recipe, layout="both")
  kept = save_residual("linear", x_q._replace(rows=None))
  return Operand(x_q.rows, None, kept.scale), kept


def columns_of(kept: Operand, recipe: CoatRecipe) -> Operand:
  """Columns of a saved operand, for a weight's gradient."""
  if kept.columns is not None:
    return kept
  return ops.turn_blocks(kept, implementation=recipe.implementation)


def gradient_operand(g: Array, recipe: CoatRecipe) -> Operand:
  """The gradient of a product's output, as the products behind it read it."""
  how: Any = dict(
    dtype=recipe.formats.gradients,
    layout="both",
    implementation=recipe.implementation,
  )
  if recipe.scaling == "block":
    return ops.quantize_blocks(g, **how)
  return ops.quantize_tensor(g, axis_names=scale_axes(recipe.axes), **how)
