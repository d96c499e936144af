# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls of a mixture of experts, in BF16 or FP8.

Arguments of type `Operand` are multiplied in FP8, arrays in their own dtype. In
an FP8 matmul, all rows of tokens or gradients share a scale, and the weight of
each expert has its own scale. The backward pass reuses the scales of the
forward pass. If the FP8 codes of the weights are cached, neither pass quantizes
the weights.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.operands import gather_columns
from coat_jax.layers.residuals import cotangent
from coat_jax.layers.routing import Rows, to_rows
from coat_jax.mesh import (
  gather_experts,
  reduce_gradient,
  scale_axes,
  size_of,
)
from coat_jax.ops import Operand, Scaling
from coat_jax.recipes import CoatRecipe


class Scales(NamedTuple):
  """Scales of the forward pass's operands; all None for matmuls in BF16.

  Attributes:
    y: scale of the first matmul's input, [].
    gate_up: `Operand` with only the scales [E] of the first weight; None if the
      weight has a cache.
    z, down: the same for the second matmul.
  """

  y: Array | None
  gate_up: Operand | None
  z: Array | None
  down: Operand | None


def scale_of(x: Array | Operand) -> Array | None:
  """Returns an operand's scale; None for an array."""
  return x.scale if isinstance(x, Operand) else None  # pyright: ignore[reportReturnType]


def copies_in_rows(
  x: Array,
  rows: Rows,
  scaling: Scaling,
  recipe: CoatRecipe,
  scale: Array | None = None,
) -> Array | Operand:
  """Copies tokens with `to_rows`; quantizes them first if experts use FP8."""
  if recipe.experts == "bf16":
    return to_rows(x, rows, recipe.implementation)
  # Quantize first, so that only FP8 values are copied.
  q = ops.quantize_tensor(
    x, scaling=scaling, scale=scale, implementation=recipe.implementation
  )
  assert q.rows is not None
  return q._replace(rows=to_rows(q.rows, rows, recipe.implementation))


def cache_experts(w: Array, recipe: CoatRecipe) -> Operand | None:
  """Computes the cache that `recipe.weight_cache` selects for w [E, D, *F]."""
  if recipe.experts == "bf16" or recipe.weight_cache == "none":
    return None
  w = lax.stop_gradient(w.reshape(*w.shape[:2], -1))
  if recipe.weight_cache == "codes":
    codes = _quantized(w, None, recipe)
    return codes._replace(columns=_in_columns(codes, recipe).columns)
  find = functools.partial(
    ops.tensor_scale, scaling=_scaling(recipe), implementation="xla"
  )
  scale: Any = jax.vmap(find)(w)
  return Operand(None, None, scale)


def multiply_rows(
  x: Array | Operand,
  w: Array,
  rows: Rows,
  recipe: CoatRecipe,
  dtype: DTypeLike,
  cache: Operand | None = None,
) -> tuple[Array, Operand | None]:
  """Multiplies each row of x by its expert's weight, from w [E, D, *F].

  `cache` comes from `cache_experts`. If x is in FP8 and there is no cache, the
  second result holds the scales of w, for the argument `cache` of later calls.
  Otherwise the second result is None.
  """
  how = recipe.implementation
  if isinstance(x, Operand):
    w_q = _weight_codes(w, "columns", cache, recipe)
    y = ops.grouped_linear_fwd(
      x, w_q, rows.sizes, dtype=dtype, implementation=how
    )
    return y, Operand(None, None, w_q.scale) if cache is None else None
  w = _weight(w, x.dtype, recipe)
  return ops.grouped_fwd(
    x, w, rows.sizes, dtype=dtype, implementation=how
  ), None


def input_gradient(
  g: Array | Operand,
  w: Array,
  cache: Operand | None,
  rows: Rows,
  recipe: CoatRecipe,
  dtype: DTypeLike,
) -> Array:
  """Multiplies each row of g by the transpose of its expert's weight."""
  how = recipe.implementation
  if isinstance(g, Operand):
    w_q = _weight_codes(w, "rows", cache, recipe)
    return ops.grouped_linear_dgrad(
      g, w_q, rows.sizes, dtype=dtype, implementation=how
    )
  w = _weight(w, g.dtype, recipe)
  return ops.grouped_dgrad(g, w, rows.sizes, dtype=dtype, implementation=how)


def weight_gradient(
  x: Array | Operand,
  g: Array | Operand,
  w: Array,
  rows: Rows,
  recipe: CoatRecipe,
) -> Array:
  """Computes x^T g for each expert; on a mesh, returns the device's shard."""
  axes = recipe.axes
  # XLA reduce-scatters along the outermost dimension in memory. To scatter
  # along a different dimension, it would first copy all of dw.
  is_scattered = axes is not None and size_of(axes.fsdp) > 1
  op = ops.grouped_wgrad
  if isinstance(x, Operand) and isinstance(g, Operand):
    op, x, g = (
      ops.grouped_linear_wgrad,
      _in_columns(x, recipe),
      _in_columns(g, recipe),
    )
  dw = op(
    x,
    g,
    rows.sizes,
    dtype=w.dtype if axes is None else axes.grad_dtype,
    rows_first=is_scattered,
    implementation=recipe.implementation,
  )
  dw = reduce_gradient(dw, axes, has_columns=True, is_of_experts=True)
  if is_scattered:
    # Without this layout, XLA would transpose the stacked gradients of layers.
    dw = jnp.moveaxis(dw, 0, 1)
    dw = with_layout_constraint(dw, Layout((0, 1, 2)))
  return cotangent(dw, w)


def _in_columns(x: Operand, recipe: CoatRecipe) -> Operand:
  """Returns an operand in column layout; transposes its rows if necessary."""
  if x.columns is not None:
    return x
  assert x.rows is not None
  how = recipe.implementation
  columns = ops.turn_codes(x.rows, implementation=how)
  return Operand(None, columns, x.scale)


def _weight(w: Array, dtype: DTypeLike, recipe: CoatRecipe) -> Array:
  """Casts w [E, D, *F] and gathers its rows; returns [E, D, F]."""
  w = w.reshape(*w.shape[:2], -1).astype(dtype)
  return gather_experts(w, recipe.axes)


def _weight_codes(
  w: Array, layout: ops.Layout, cache: Operand | None, recipe: CoatRecipe
) -> Operand:
  """Returns the FP8 codes of w [E, D, *F] in `layout`, with all rows."""
  if cache is None or cache.rows is None:
    scale = None if cache is None else scale_of(cache)
    codes = _quantized(w.reshape(*w.shape[:2], -1), scale, recipe)
    assert codes.rows is not None
    rows = gather_experts(codes.rows, recipe.axes)
    gathered = Operand(rows, None, codes.scale)
    return gathered if layout == "rows" else _in_columns(gathered, recipe)
  if layout == "rows":
    rows = gather_experts(cache.rows, recipe.axes)
    return Operand(rows, None, cache.scale)
  return Operand(None, _gathered_columns(cache, recipe), cache.scale)


def _gathered_columns(cache: Operand, recipe: CoatRecipe) -> Array:
  """Gathers columns [E, F, D] over the FSDP axis, which splits D."""
  columns, axes = cache.columns, recipe.axes
  assert columns is not None
  if axes is None or size_of(axes.fsdp) == 1:
    return columns
  *leading, n = columns.shape
  columns = gather_columns(columns.reshape(-1, n), axes.fsdp, recipe)
  return columns.reshape(*leading, -1)


def _quantized(w: Array, scale: Array | None, recipe: CoatRecipe) -> Operand:
  """Quantizes a device's shard of weights [E, D, F] in row layout."""
  return ops.quantize_experts(
    w,
    scaling=_scaling(recipe),
    scale=scale,
    implementation=recipe.implementation,
  )


def _scaling(recipe: CoatRecipe) -> ops.Scaling:
  axes = recipe.axes
  shards = scale_axes(None) if axes is None else axes.same_experts
  return recipe.scaling(recipe.formats.values, shards).of_weights
