# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls of FP8 operands: each row times the weight of its group.

Rows are sorted by group, as in `ops.grouped`. Rows after the last group must be
zero, so that they do not affect the scale and add nothing to a weight's
gradient. The results of these rows are then zero too.

All rows of x share one scale, all rows of g share one scale, and each group's
weight has its own scale. Codes are multiplied exactly, and summed in f32.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.qtensor import times_scales
from coat_jax.numerics.scaling import (
  VALUES,
  Layout,
  Operand,
  PerTensor,
)
from coat_jax.ops.dispatch import kernel, op
from coat_jax.ops.grouped import ragged_product
from coat_jax.ops.linear import shapes_of
from coat_jax.ops.quantize import cast_rows, why_not_cast


def _why_not_cast(scaling, **_) -> str | None:
  if type(scaling) is not PerTensor:
    return f"needs a scale per tensor, got {type(scaling).__name__}"
  return why_not_cast(scaling.dtype)


@kernel(_why_not_cast)
def _cast_experts(
  w: Array,
  *,
  scaling: PerTensor = VALUES,
  scale: Array | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Computes `quantize_experts` with the FP8 cast instruction of GPUs.

  XLA casts the weights of all experts in one pass: see `cast_rows`.
  """
  if scale is None:
    scale = jax.vmap(scaling.find_scale)(w)
  rows = cast_rows(w, scale=scale[:, None, None], dtype=scaling.dtype)
  return Operand(
    rows=None if layout == "columns" else rows,
    columns=None if layout == "rows" else jnp.swapaxes(rows, 1, 2),
    scale=scale,
  )


@op(cuda=_cast_experts)
def quantize_experts(
  w: Array,
  *,
  scaling: PerTensor = VALUES,
  scale: Array | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Quantizes weights [E, D, F]: rows [E, D, F], columns [E, F, D], scale [E].

  To reuse the scales of an earlier call for the same weights, pass `scale`.
  """
  if scale is None:
    scale = jax.vmap(scaling.find_scale)(w)
  return jax.vmap(lambda w, scale: scaling.quantize(w, scale, layout))(w, scale)


def _check_rows(x: Operand, w: Operand, sizes, codes: str) -> None:
  rows, weights = x.rows, getattr(w, codes)
  if rows is None or weights is None:
    raise ValueError(
      f"grouped_linear: needs rows of x or g, and {codes} of weights, got "
      f"{shapes_of(x)} and {shapes_of(w)}; quantize them in these layouts"
    )
  fits = rows.ndim == 2 and weights.ndim == 3
  fits = fits and rows.shape[1] == weights.shape[2]
  scales = getattr(w.scale, "shape", None)  # None for block scales.
  if not fits or not sizes.shape == scales == weights.shape[:1]:
    raise ValueError(
      "grouped_linear: needs rows [M, K], weights [E, N, K], and scales and "
      f"sizes [E], got {rows.shape}, {weights.shape}, {scales} and "
      f"{sizes.shape}; pass arrays whose K and E match"
    )


def _check_columns(x: Operand, g: Operand, sizes, **_) -> None:
  a, b = x.columns, g.columns
  if a is None or b is None:
    raise ValueError(
      "grouped_linear: needs tokens and gradients in columns, got "
      f"{shapes_of(x)} and {shapes_of(g)}; quantize both in this layout"
    )
  if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or sizes.ndim != 1:
    raise ValueError(
      "grouped_linear: needs columns [D, M] and [F, M], and sizes [E], got "
      f"{a.shape}, {b.shape} and {sizes.shape}; pass arrays with the same M"
    )


def group_of_rows(sizes: Array, m: int) -> Array:
  """Returns each row's group [m]; rows after the last group get its index."""
  group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(m), side="right")
  return jnp.minimum(group, len(sizes) - 1)


def _rows_times(x: Array, w: Array, sizes: Array, x_scale, w_scale, dtype):
  """Multiplies codes x [M, K] by their group's w^T [K, N] and both scales."""
  out = _dot(x, w, sizes, (1, 2))
  scale = w_scale[group_of_rows(sizes, len(x))][:, None]
  return times_scales(out, x_scale, scale).astype(dtype)


def _dot(a, b, sizes: Array, summed: tuple[int, int], ragged: int = 0) -> Array:
  """Computes `ragged_product` of codes."""
  # BF16 holds every value of both FP8 formats.
  a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
  return ragged_product(a, b, sizes, summed, ragged)


@op(
  check=lambda x, w, sizes, **_: _check_rows(x, w, sizes, "columns"),
  mosaic="grouped_product",
)
def grouped_linear_fwd(
  x: Operand, w: Operand, sizes: Array, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes y [M, F] = x w from x.rows [M, D] and w.columns [E, F, D]."""
  return _rows_times(x.rows, w.columns, sizes, x.scale, w.scale, dtype)  # pyright: ignore[reportArgumentType]


@op(
  check=lambda g, w, sizes, **_: _check_rows(g, w, sizes, "rows"),
  mosaic="grouped_product",
)
def grouped_linear_dgrad(
  g: Operand, w: Operand, sizes: Array, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes dx [M, D] = g w^T from g.rows [M, F] and w.rows [E, D, F]."""
  return _rows_times(g.rows, w.rows, sizes, g.scale, w.scale, dtype)  # pyright: ignore[reportArgumentType]


@op(check=_check_columns, mosaic="grouped_product")
def grouped_linear_wgrad(
  x: Operand,
  g: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
) -> Array:
  """Computes dw [E, D, F] from x.columns [D, M] and g.columns [F, M].

  dw is zero for empty groups. If `rows_first`, dw is [D, E, F].
  """
  dw = _dot(x.columns, g.columns, sizes, (1, 1), ragged=1)
  dw = times_scales(dw, x.scale, g.scale).astype(dtype)  # pyright: ignore[reportArgumentType]
  return jnp.moveaxis(dw, 0, 1) if rows_first else dw
