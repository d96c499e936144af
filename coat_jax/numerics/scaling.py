# SPDX-License-Identifier: Apache-2.0
"""Scalings: which values of a tensor share a scale when it is quantized.

Scales of blocks and tiles are powers of two, so each dequantized value is exact
in BF16. If E4M3 codes are requantized along the other axis, a value can change
only if it is at most 2^-14 times the largest value in its new block.

Source: arXiv:2410.19313, section 5; for blocks, DeepSeek-V3 (arXiv:2412.19437),
section 3.3.2, and docs/deviations.md 24.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, E5M2, as_format, saturating_cast
from coat_jax.numerics.qtensor import (
  QTensor,
  amax_to_scale,
  group_amax,
  join_groups,
  power_of_two_scale,
  quantize,
  quantize_with_scale,
  tensor_amax,
)

BLOCK = 128

Layout = Literal["rows", "columns", "both"]


class BlockScales(NamedTuple):
  """Scales of an operand in blocks of 128 (see `Blocks`): f32 powers of two.

  Attributes:
    rows: scales [..., ceil(n / 128)] of `Operand.rows` [..., n]. For a weight
      [m, n], they are [ceil(m / 128), ceil(n / 128)].
    columns: scales [n, ceil(m / 128)] of `Operand.columns` [n, m]. For a weight
      [m, n], they are [ceil(n / 128), ceil(m / 128)].
  """

  rows: Array | None
  columns: Array | None


class Operand(NamedTuple):
  """A matrix in FP8 with its scales, laid out for the matmuls that read it.

  FP8 matmuls on Hopper require that both operands have the contracted axis
  last. So a matrix whose first axis is contracted is transposed when it is
  quantized: transposing its FP8 codes later would cost a pass over memory.

  Attributes:
    rows: FP8 [..., n], or None if no matmul reads this layout.
    columns: the transposed matrix, FP8 [n, m] for m rows in total; or None.
    scale: f32 scalar that multiplies the codes, or `BlockScales`, which hold
      the scales of rows and of columns.
  """

  rows: Array | None
  columns: Array | None
  scale: Array | BlockScales


type Scales = Array | BlockScales


@dataclasses.dataclass(frozen=True)
class Groups:
  """One BF16 scale, rounded up, per group of 1 x `size` values.

  Norms and activation functions read and save their inputs in groups.
  """

  size: int
  dtype: DTypeLike = E4M3

  def quantize(self, x: Array) -> QTensor:
    """Quantizes [..., n] along the last axis."""
    return quantize(
      x, group_size=self.size, dtype=self.dtype, scale_dtype=jnp.bfloat16
    )


@dataclasses.dataclass(frozen=True)
class Scaling(abc.ABC):
  """Base class of the scalings of matmul operands.

  You can pass your own subclass to a recipe: `CoatRecipe(scaling=Yours)`. It
  runs as plain JAX, since kernels support only `PerTensor` and `Blocks`.

  Attributes:
    dtype: format of the codes.
    axis_names: inside `jax.shard_map`, the axes over which all shards of a
      tensor share one scale.
    description: describes the scales in `CoatRecipe.describe`.
    saves_rows: whether a layer saves its input in row layout, and the backward
      pass computes the column layout with `turn`. Otherwise the layer saves the
      column layout.
    saves_scale: whether a layer saves its weight's scale for the backward pass.
      Otherwise the backward pass recomputes the scale.

  Raises:
    ValueError: the format is not defined in `coat_jax.numerics.formats`.
  """

  dtype: DTypeLike = E4M3
  axis_names: tuple[str, ...] = ()

  description: ClassVar[str] = "scales of a custom scaling"
  saves_rows: ClassVar[bool] = False
  saves_scale: ClassVar[bool] = True

  def __post_init__(self):
    # Convert a name to a dtype, so that equal scalings compare equal.
    object.__setattr__(self, "dtype", as_format(self.dtype))

  def find_scale(self, x: Array) -> Scales | None:
    """Returns the scale of x; None if rows and columns have separate scales."""
    del x

  @abc.abstractmethod
  def quantize(
    self, x: Array, scale: Scales | None = None, layout: Layout = "rows"
  ) -> Operand:
    """Quantizes x [..., n]; `scale` is `find_scale(x)`, if already known."""

  def find_joined_scale(self, parts: Sequence[Array], n: int) -> Scales | None:
    """Returns the scale that `quantize_joined` needs for the same parts."""
    return self.find_scale(_joined(parts, n))

  def quantize_joined(
    self,
    parts: Sequence[Array],
    n: int,
    scale: Scales | None = None,
    layout: Layout = "rows",
  ) -> Operand:
    """Concatenates parts along the last axis, and quantizes the result.

    Each part contains n values per row, split into [..., groups, group_size]; a
    short last group is padded with zeros.
    """
    return self.quantize(_joined(parts, n), scale, layout)

  def turn(self, x: Operand) -> Operand:
    """Computes the columns of an operand from its rows."""
    assert x.rows is not None
    return Operand(None, x.rows.reshape(-1, x.rows.shape[-1]).T, x.scale)

  @property
  def of_weights(self) -> "Scaling":
    """The scaling of weights that these operands are multiplied by."""
    return self


@dataclasses.dataclass(frozen=True)
class PerTensor(Scaling):
  """One f32 scale per tensor, from the tensor's largest magnitude."""

  description: ClassVar[str] = "a scale per tensor"

  def find_scale(self, x: Array) -> Array:
    amax = tensor_amax(x, axis_names=self.axis_names)
    return amax_to_scale(amax, self.dtype)

  def quantize(self, x, scale=None, layout="rows"):
    scale = self.find_scale(x) if scale is None else scale
    return self._in_layout(self._codes(x, scale), scale, layout)

  def find_joined_scale(self, parts, n):
    if type(self) is not PerTensor:  # A subclass may need more than maxima.
      return super().find_joined_scale(parts, n)
    return self.find_scale(jnp.stack([tensor_amax(x) for x in parts]))

  def quantize_joined(self, parts, n, scale=None, layout="rows"):
    if type(self) is not PerTensor:
      return super().quantize_joined(parts, n, scale, layout)
    scale = self.find_joined_scale(parts, n) if scale is None else scale
    # Join codes, not values: XLA for TPUs would store joined values in memory.
    codes = _joined([self._codes(x, scale) for x in parts], n)
    return self._in_layout(codes, scale, layout)

  def _codes(self, x, scale):
    assert isinstance(scale, Array)
    q = quantize_with_scale(x, scale, group_size=None, dtype=self.dtype)
    return q.qvalue

  def _in_layout(self, rows, scale, layout):
    return Operand(
      rows=None if layout == "columns" else rows,
      columns=None if layout == "rows" else rows.reshape(-1, rows.shape[-1]).T,
      scale=scale,
    )


# The default scalings of values and gradients, which kernels support.
VALUES, GRADIENTS = PerTensor(), PerTensor(E5M2)


@dataclasses.dataclass(frozen=True)
class Blocks(Scaling):
  """A scale per 128 values along the axis that a matmul sums over.

  Rows [..., n] are quantized along n, columns [n, m] along m.
  """

  description: ClassVar[str] = "a scale per 128 values that a matmul sums over"
  saves_rows: ClassVar[bool] = True
  saves_scale: ClassVar[bool] = False

  def quantize(self, x, scale=None, layout="rows"):
    del scale
    rows, row_scale = columns, column_scale = None, None
    if layout != "columns":
      rows, row_scale = self._quantize(x)
    if layout != "rows":
      columns, column_scale = self._quantize(x.reshape(-1, x.shape[-1]).T)
    return Operand(rows, columns, BlockScales(row_scale, column_scale))

  def turn(self, x: Operand) -> Operand:
    assert x.rows is not None and isinstance(x.scale, BlockScales)
    assert x.scale.rows is not None
    n, groups = x.rows.shape[-1], x.scale.rows.shape[-1]
    codes, scale = x.rows.reshape(-1, n), x.scale.rows.reshape(-1, groups)
    return self.quantize(block_values(codes, scale), layout="columns")

  @property
  def of_weights(self) -> "Tiles":
    return Tiles(self.dtype, self.axis_names)

  def _quantize(self, x: Array) -> tuple[Array, Array]:
    scale = power_of_two_scale(group_amax(x, BLOCK), self.dtype)
    q = quantize_with_scale(x, scale, group_size=BLOCK, dtype=self.dtype)
    return q.qvalue, q.scale


@dataclasses.dataclass(frozen=True)
class Tiles(Scaling):
  """A scale per 128 x 128 values of a weight, for matmuls with `Blocks`.

  The columns are the transposed rows, with transposed scales.
  """

  saves_scale: ClassVar[bool] = False

  def find_scale(self, x: Array) -> BlockScales:
    amax = group_amax(group_amax(x, BLOCK).T, BLOCK).T
    return BlockScales(power_of_two_scale(amax, self.dtype), None)

  def quantize(self, x, scale=None, layout="rows"):
    scale = self.find_scale(x) if scale is None else scale
    assert isinstance(scale, BlockScales)
    found = scale.rows
    assert found is not None
    spread = _spread(found, x.shape)
    codes = saturating_cast(x.astype(jnp.float32) / spread, self.dtype)
    has_rows, has_columns = layout != "columns", layout != "rows"
    return Operand(
      codes if has_rows else None,
      codes.T if has_columns else None,
      BlockScales(
        found if has_rows else None, found.T if has_columns else None
      ),
    )


def _joined(parts: Sequence[Array], n: int) -> Array:
  """Joins the groups of each part to [..., n], and concatenates the parts."""
  rows = [join_groups(x, n) for x in parts]
  return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)


def block_values(
  codes: Array, scale: Array, dtype: DTypeLike = jnp.float32
) -> Array:
  """Dequantizes codes [m, n] in blocks or tiles; the result is exact in BF16.

  `scale` is [m, ceil(n / 128)] for blocks, and [ceil(m / 128), ceil(n / 128)]
  for tiles.
  """
  values = codes.astype(jnp.float32) * _spread(scale, codes.shape)
  return values.astype(dtype)


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
  """Repeats scales of blocks or tiles to the shape [m, n] of the values."""
  m, n = shape
  if scale.shape[0] != m:
    scale = jnp.repeat(scale, BLOCK, axis=0)[:m]
  return jnp.repeat(scale, BLOCK, axis=1)[:, :n]
