# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls: multiply each row by the weight of its group.

In a mixture of experts, a group contains the rows of one expert. The first
sizes[0] rows belong to group 0, the next sizes[1] rows to group 1, and so on. A
group may be empty.

Rows after the last group belong to no group: their results are zero, and they
add nothing to a weight's gradient. In `grouped_wgrad`, g must be finite in
these rows, because kernels set only x to zero there.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from coat_jax.ops.dispatch import op


def _check_x(x, w, sizes, **_) -> None:
  _check_weights(x, w, sizes, 1, "rows [M, D]")


def _check_g(g, w, sizes, **_) -> None:
  _check_weights(g, w, sizes, 2, "gradients [M, F]")


def _check_weights(rows, w, sizes, axis: int, needed: str) -> None:
  """Raises unless the rows fit this axis of the weights."""
  fits = rows.ndim == 2 and w.ndim == 3 and sizes.shape == w.shape[:1]
  if not fits or rows.shape[1] != w.shape[axis]:
    raise ValueError(
      f"grouped: needs {needed}, weights [E, D, F] and sizes [E], got "
      f"{rows.shape}, {w.shape} and {sizes.shape}; pass arrays whose D, F "
      "and E match"
    )


def _check_rows(x, g, sizes, **_) -> None:
  if x.ndim != 2 or g.ndim != 2 or len(x) != len(g) or sizes.ndim != 1:
    raise ValueError(
      "grouped: needs rows [M, D], gradients [M, F] and sizes [E], got "
      f"{x.shape}, {g.shape} and {sizes.shape}; pass as many gradients as rows"
    )


def ragged_product(
  a: Array, b: Array, sizes: Array, summed: tuple[int, int], ragged: int = 0
) -> Array:
  """Multiplies a and b, and sums over one axis of each (`summed`), in f32.

  Axis `ragged` of `a` is divided into groups. If the product is not summed over
  that axis, axis 0 of `b` has an entry for each group.
  """
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([summed[0]], [summed[1]]), ([], [])),
    lhs_ragged_dimensions=[ragged],
    rhs_group_dimensions=[] if ragged == summed[0] else [0],
  )
  return lax.ragged_dot_general(
    a, b, sizes, dimensions, preferred_element_type=jnp.float32
  )


@op(check=_check_x, mosaic="grouped_product")
def grouped_fwd(
  x: Array, w: Array, sizes: Array, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes y [M, F]: each row of x [M, D] times its group's weight [D, F]."""
  return ragged_product(x, w, sizes, (1, 1)).astype(dtype)


@op(check=_check_g, mosaic="grouped_product")
def grouped_dgrad(
  g: Array, w: Array, sizes: Array, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes dx [M, D]: each row of g [M, F] times its group's w^T."""
  return ragged_product(g, w, sizes, (1, 2)).astype(dtype)


@op(check=_check_rows, mosaic="grouped_product")
def grouped_wgrad(
  x: Array,
  g: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
) -> Array:
  """Computes dw [E, D, F]: x^T g of each group's rows, zero for empty groups.

  If `rows_first`, dw is [D, E, F], so that devices can split its first axis.
  """
  dw = ragged_product(x, g, sizes, (0, 0)).astype(dtype)
  return jnp.moveaxis(dw, 0, 1) if rows_first else dw


@op(mosaic="take_rows")
def take_rows(x: Array, index: Array) -> Array:
  """Copies rows of x [T, n] to [M, n]; `index` [M] must be within range."""
  return x.at[index].get(mode="promise_in_bounds")
