# SPDX-License-Identifier: Apache-2.0
"""Quantizes operands of FP8 matmuls according to the recipe.

Matmuls with a weight read an operand's row layout; the matmul that computes the
weight's gradient reads the column layout. Scales of the layouts, by recipe:

  one per tensor   Both layouts share the scale; columns are transposed rows.
  blocks of 128    Rows have a scale per 128 features, columns have a scale per
                   128 tokens. The forward pass saves the rows, and the backward
                   pass requantizes them to columns.
"""

from typing import Any

from jax import Array, P, lax

from coat_jax import ops
from coat_jax.layers.residuals import save_residual
from coat_jax.mesh import check_has_positions, scale_axes, size_of, tensor_size
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import BLOCK
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipes import CoatRecipe


def value_scaling(recipe: CoatRecipe) -> ops.Scaling:
  """Returns the `Scaling` of activations in matmuls."""
  return recipe.scaling(recipe.formats.values, scale_axes(recipe.axes))


def gradient_scaling(recipe: CoatRecipe) -> ops.Scaling:
  """Returns the `Scaling` of gradients in matmuls."""
  return recipe.scaling(recipe.formats.gradients, scale_axes(recipe.axes))


def groups_of(recipe: CoatRecipe) -> ops.Groups:
  """Returns the `Groups` that quantize the inputs of nonlinear operations."""
  return ops.Groups(recipe.group_size, recipe.formats.values)


def in_groups(x: Array, recipe: CoatRecipe) -> QTensor:
  """Quantizes x [..., n], the input of a nonlinear operation."""
  return ops.quantize_groups(
    x, groups=groups_of(recipe), implementation=recipe.implementation
  )


def quantized(
  x: Array,
  recipe: CoatRecipe,
  *,
  layout: ops.Layout = "rows",
  scale: Array | None = None,
) -> Operand:
  """Quantizes a matmul's operand [..., n]; `scale` is from `scale_of`."""
  return ops.quantize_tensor(
    x,
    scaling=value_scaling(recipe),
    scale=scale,
    layout=layout,
    implementation=recipe.implementation,
  )


def scale_of(x: Operand) -> Array | None:
  """Saves and returns an operand's scale; returns None for block scales."""
  if isinstance(x.scale, ops.BlockScales):
    return None
  return save_residual("linear", x.scale)


def layout_of_input(recipe: CoatRecipe) -> ops.Layout:
  """Returns the layout that `keep_input` requires."""
  return "rows" if value_scaling(recipe).saves_rows else "both"


def keep_input(x: Operand, recipe: CoatRecipe) -> tuple[Operand, Operand]:
  """Saves a matmul's input; returns its rows, and what `columns_of` needs."""
  if value_scaling(recipe).saves_rows:
    kept = save_residual("linear", x)
    return kept, kept
  kept = save_residual("linear", x._replace(rows=None))
  return Operand(x.rows, None, kept.scale), kept


def columns_of(kept: Operand, recipe: CoatRecipe) -> Operand:
  """Returns the columns of a saved operand, for a weight's gradient."""
  if kept.columns is not None:
    return kept
  return ops.turn_operand(
    kept,
    scaling=value_scaling(recipe),
    implementation=recipe.implementation,
  )


def gradient_operand(g: Array, recipe: CoatRecipe) -> Operand:
  """Quantizes the gradient of a matmul's output, in both layouts."""
  return ops.quantize_tensor(
    g,
    scaling=gradient_scaling(recipe),
    layout="both",
    implementation=recipe.implementation,
  )


def check_scaling(recipe: CoatRecipe) -> None:
  """Raises if the tensor axis would split blocks that share a scale."""
  if recipe.in_blocks and tensor_size(recipe.axes) > 1:
    raise ValueError(
      "layers: recipe fp8_block needs one device along the tensor axis, got "
      f"{tensor_size(recipe.axes)}; shard weights over fsdp, or use "
      "recipes.coat(), whose scales do not depend on the sharding"
    )


def gather_weight(w: Operand, recipe: CoatRecipe) -> Operand:
  """Gathers a weight's codes and tile scales over fsdp, which splits rows."""
  axes = recipe.axes
  if axes is None or size_of(axes.fsdp) == 1:
    return w
  scale = w.scale
  if isinstance(scale, BlockScales):
    _check_tiles(w)
    scale = BlockScales(*_gather_both(*scale, axes.fsdp, recipe))
  return Operand(*_gather_both(w.rows, w.columns, axes.fsdp, recipe), scale)


def _gather_both(rows, columns, axis, recipe):
  """Gathers rows [D, F] and columns [F, D] along D."""
  if rows is not None:
    rows = lax.all_gather(rows, axis, axis=0, tiled=True)
  if columns is not None:
    columns = gather_columns(columns, axis, recipe)
  return rows, columns


def _check_tiles(w: Operand) -> None:
  rows = w.columns.shape[1] if w.rows is None else w.rows.shape[0]  # pyright: ignore[reportOptionalMemberAccess]
  if rows % BLOCK:
    raise ValueError(
      "layers: with recipe fp8_block each device along fsdp must have whole "
      f"tiles of {BLOCK} rows of a weight, got {rows} rows; use fewer devices "
      "along fsdp, or wider layers"
    )


def gather_sequence(x: Operand, recipe: CoatRecipe, *, batch: int) -> Operand:
  """Gathers rows [B, T, D] and columns [D, B T] of whole sequences."""
  axes = recipe.axes
  if axes is None or size_of(axes.tensor) == 1:
    return x
  rows, columns = x.rows, x.columns
  if rows is not None:
    check_has_positions(rows)
    rows = lax.all_gather(rows, axes.tensor, axis=1, tiled=True)
  if columns is not None:
    n = columns.shape[0]
    columns = columns.reshape(n * batch, -1)
    columns = gather_columns(columns, axes.tensor, recipe).reshape(n, -1)
  return x._replace(rows=rows, columns=columns)


def gather_columns(x: Array, axis: str | None, recipe: CoatRecipe) -> Array:
  """Gathers arrays [f, k] of n devices into [f, n k]."""
  shards = lax.all_gather(x, axis)
  return ops.join_columns(shards, implementation=recipe.implementation)


def cache_specs(cache: Operand | None, w: P, num_stacked: int = 0) -> Any:
  """Returns the specs of a weight's cache; w is the spec of the weight.

  `cache` and w describe one layer, whose weight is [D, ..., F], or
  [E, D, ..., F] if each of E experts has a scale. The returned specs begin with
  `num_stacked` unsplit axes, for stacked layers.
  """
  if cache is None:
    return None
  in_blocks = isinstance(cache.scale, BlockScales)
  scale_ndim = 0 if in_blocks else cache.scale.ndim  # pyright: ignore[reportAttributeAccessIssue]
  leading = *(None,) * num_stacked, *w[:scale_ndim]
  w = w[scale_ndim:]
  first, last = w[0], w[-1] if len(w) > 1 else None
  rows: Any = P(*leading, first, last)
  columns: Any = P(*leading, last, first)
  scale: Any = BlockScales(rows, columns) if in_blocks else P(*leading)
  return Operand(rows, columns, scale)
