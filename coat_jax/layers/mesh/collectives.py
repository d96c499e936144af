# SPDX-License-Identifier: Apache-2.0
"""What blocks move between devices: FP8 codes there, gradients back.

  weights     codes of its rows gathered over fsdp; the gradient summed over the
              batch's axes in `axes.grad_dtype`, each device keeping its rows
  sequences   split over tensor between blocks: codes gathered in front of a
              product, partial products summed and split again behind one
  scales      the largest amax of all devices, where each operation finds its
              own, over `scale_axes`

Inside `jax.shard_map`. Without axes, and over axes of one device, these do
nothing.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax import ops
from coat_jax.ops import BlockScales, Operand
from coat_jax.ops.blocks import BLOCK
from coat_jax.recipe import CoatRecipe, MeshAxes


def size_of(axis: str | None) -> int:
  """How many devices an axis of the mesh has; 1 for None."""
  return 1 if axis is None else jax.lax.axis_size(axis)


def tensor_size(axes: MeshAxes | None) -> int:
  """Among how many devices heads and columns are split."""
  return 1 if axes is None else size_of(axes.tensor)


def scale_axes(axes: MeshAxes | None) -> tuple[str, ...]:
  """The axes over which all shards of a tensor have one scale.

  Inside a caller's `shard_map`, where nothing says what its axes split, all of
  them.
  """
  if axes is None:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
  return axes.tokens


def gather_weight(w: Operand, recipe: CoatRecipe) -> Operand:
  """All rows of a weight [D, F], of which a device has a share."""
  axes = recipe.axes
  if axes is None or size_of(axes.fsdp) == 1:
    return w
  scale = w.scale
  if isinstance(scale, BlockScales):
    _check_tiles(w)
    scale = BlockScales(*_gather_both(*scale, axes.fsdp, recipe))
  return Operand(*_gather_both(w.rows, w.columns, axes.fsdp, recipe), scale)


def _gather_both(rows, columns, axis, recipe):
  """All of rows [D, F] and columns [F, D], of which a device has some of D."""
  rows = _gather(rows, axis, 0)
  if columns is not None:
    columns = _gather_columns(columns, axis, recipe)
  return rows, columns


def _check_tiles(w: Operand) -> None:
  rows = w.columns.shape[1] if w.rows is None else w.rows.shape[0]  # pyright: ignore[reportOptionalMemberAccess]
  if rows % BLOCK:
    raise ValueError(
      "layers: with scaling='block' each device along fsdp must have whole "
      f"tiles of {BLOCK} rows of a weight, got {rows}; use fewer devices along "
      "fsdp, or wider layers"
    )


def check_scaling(recipe: CoatRecipe) -> None:
  """Raises where products in blocks would be split over a tensor axis."""
  if recipe.scaling == "block" and tensor_size(recipe.axes) > 1:
    raise ValueError(
      "layers: scaling='block' needs one device along the tensor axis, got "
      f"{tensor_size(recipe.axes)}; split weights over fsdp, or use "
      "recipe.coat(), whose scales do not depend on how a weight is split"
    )


def gather_experts(w: Array, axes: MeshAxes | None) -> Array:
  """All rows of the weights of experts [E, D, F], of which it has a share."""
  if axes is None or size_of(axes.fsdp) == 1:
    return w
  # With axis=1 XLA wants D to be the outermost axis in memory. For that it
  # would transpose the weights of all layers, in front of the scan over them.
  shards = lax.all_gather(w, axes.fsdp, axis=0)
  experts, _, features = w.shape
  return jnp.moveaxis(shards, 0, 1).reshape(experts, -1, features)


def reduce_gradient(
  dw: Array,
  axes: MeshAxes | None,
  *,
  has_columns: bool,
) -> Array:
  """A device's rows of a weight's gradient, summed over all tokens.

  Args:
    dw: [D, F], of the device's own tokens; of several experts [D, E, F] where
      fsdp has several devices.
    axes: of the mesh.
    has_columns: whether the device's columns or inputs are its own; otherwise
      devices along tensor have other tokens of the same weight.
  """
  if axes is None:
    return dw
  over = [name for name in axes.batch if name != axes.fsdp]
  if axes.tensor is not None and not has_columns:
    over.append(axes.tensor)
  if size_of(axes.fsdp) > 1:
    dw = lax.psum_scatter(dw, axes.fsdp, scatter_dimension=0, tiled=True)
  return _sum(dw, over)


def sum_tokens(
  x: Array, axes: MeshAxes | None, *, all_positions: bool = False
) -> Array:
  """Sums over devices what each has computed of its tokens.

  Args:
    x: of any shape.
    axes: of the mesh.
    all_positions: whether x is of whole sequences, and the device's columns.
  """
  if axes is None:
    return x
  return _sum(x, axes.batch if all_positions else axes.tokens)


def gather_sequence(x: Operand, recipe: CoatRecipe, *, batch: int) -> Operand:
  """Codes of whole sequences: rows [B, T, D] and columns [D, B T].

  Args:
    x: of the device's positions.
    recipe: its axes are those of the mesh.
    batch: B.
  """
  axes = recipe.axes
  if axes is None or size_of(axes.tensor) == 1:
    return x
  _check_has_positions(x.rows)
  rows, columns = _gather(x.rows, axes.tensor, 1), x.columns
  if columns is not None:
    n = columns.shape[0]
    columns = columns.reshape(n * batch, -1)
    columns = _gather_columns(columns, axes.tensor, recipe).reshape(n, -1)
  return x._replace(rows=rows, columns=columns)


def gather_positions[Tree](tree: Tree, axes: MeshAxes | None) -> Tree:
  """Arrays [B, T, ...] of whole sequences, from those of its positions."""
  if axes is None or size_of(axes.tensor) == 1:
    return tree
  jax.tree.map(_check_has_positions, tree)
  return jax.tree.map(lambda x: _gather(x, axes.tensor, 1), tree)


def token_shards(axes: MeshAxes | None) -> int:
  """Among how many devices tokens are split."""
  return 1 if axes is None else math.prod(map(size_of, axes.tokens))


def scatter_sequence(y: Array, axes: MeshAxes | None) -> Array:
  """The device's positions of the sum [B, T, D] of all devices' products."""
  if axes is None or size_of(axes.tensor) == 1:
    return y
  _check_has_positions(y)
  devices = size_of(axes.tensor)
  if y.shape[1] % devices:
    raise ValueError(
      "layers: on a mesh sequences must be a multiple of its tensor axis long, "
      f"got {y.shape[1]} positions and {devices} devices; pad them"
    )
  return lax.psum_scatter(y, axes.tensor, scatter_dimension=1, tiled=True)


def _check_has_positions(x: Array | None) -> None:
  if x is not None and x.ndim < 3:
    raise ValueError(
      "layers: on a mesh whose tensor axis has several devices blocks take "
      f"[B, T, D], got rows of {x.shape[-1]}; reshape them into sequences"
    )


def _gather(x: Array | None, axis: str | None, dimension: int) -> Array | None:
  if x is None:
    return None
  return lax.all_gather(x, axis, axis=dimension, tiled=True)


def _gather_columns(x: Array, axis: str | None, recipe: CoatRecipe) -> Array:
  """[f, k] of each device to [f, P k]."""
  shards = lax.all_gather(x, axis)
  return ops.join_columns(shards, implementation=recipe.implementation)


def _sum(x: Array, names) -> Array:
  names = tuple(name for name in names if size_of(name) > 1)
  return lax.psum(x, names) if names else x
