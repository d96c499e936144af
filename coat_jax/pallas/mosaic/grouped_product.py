# SPDX-License-Identifier: Apache-2.0
"""Grouped (ragged) matmuls on Hopper's tensor cores, in Mosaic GPU.

Rows are sorted by group (expert), and each group has its own weight. In the
shapes below, M is the number of rows and E the number of groups.

  FP8 codes:
  grouped_linear_fwd     y  = x w      [M, D] x [E, F, D]^T -> [M, F]
  grouped_linear_dgrad   dx = g w^T    [M, F] x [E, D, F]^T -> [M, D]
  grouped_linear_wgrad   dw = x^T g    [D, M] x [F, M]^T, for each group's rows

  BF16 or f16:
  grouped_fwd            y  = x w      [M, D] x [E, D, F] -> [M, F]
  grouped_dgrad          dx = g w^T    [M, F] x [E, D, F]^T -> [M, D]
  grouped_wgrad          dw = x^T g    [M, D]^T x [M, F], for each group's rows

If a BF16 or f16 operand cannot be cut into whole blocks, it is first copied and
padded with zeros.

Results differ from those of the definitions in `ops` in two cases:

  - The kernel gets the product of both FP8 operands' scales, which is inexact
    or 0 below 1.2e-38.
  - To compute dw of a group, rows of other groups are set to zero in x, but not
    in g. So NaN and infinities in g reach dw of all groups in the same block of
    128 rows (64 rows for BF16 and f16).

TFLOP/s for gate and up of Qwen3-30B-A3B on an H200:

             FP8             BF16
  y and dx   1,040 to 1,060  470 to 480
  dw, BF16   800             410
  dw, f32    610

Without these kernels, XLA multiplies every row by every group's weight.

If groups are small, memory bandwidth limits the speed of dw. For example, with
512 rows for each of the model's 128 experts, an H100 could compute dw in
0.21 ms, but moving all bytes takes 0.55 ms for f32 dw, or 0.31 ms for BF16 dw.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import is_fp8
from coat_jax.numerics.scaling import BLOCK, Operand
from coat_jax.ops.dispatch import kernel
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import (
  device,
  grouped_gradient,
  grouped_kernel,
  grouped_rows,
  wgmma,
)
from coat_jax.pallas.mosaic.grouped_kernel import Tile, Work
from coat_jax.pallas.mosaic.grouped_table import blocks_of_tokens, tiles_of_rows
from coat_jax.pallas.mosaic.wgmma import in_128_bytes

TWO, THREE = Tile(warpgroups=2, stages=5, band=16), Tile(warpgroups=3, stages=3)
TILES = {"two": TWO, "three": THREE}
# Tiles for weight gradients. Those in f32 take longer to write, and meanwhile
# more blocks are loaded.
GRADIENT = Tile(warpgroups=3, stages=4, band=16)
F32_GRADIENT = Tile(warpgroups=3, stages=5, slots=1, band=16)
# A run (see `grouped_gradient`) has at most _MOST_GROUPS groups, but fewer if a
# program would otherwise compute fewer than _FEWEST_TILES tiles.
_MOST_GROUPS, _FEWEST_TILES = 8, 4


def _why_not(a, b, dtype: DTypeLike, multiples: tuple, dtypes) -> str | None:
  """Checks dtypes and shapes; `multiples` are for a's axes and b's last two."""
  reason = device.why_not_hopper()
  if reason is not None:
    return reason
  if jnp.dtype(dtype) not in dtypes:
    names = " or ".join(jnp.dtype(each).name for each in dtypes)
    return f"the kernel writes {names}, got {jnp.dtype(dtype)}"
  sizes = *a.shape, *b.shape[-2:]
  if any(n % of or n == 0 for n, of in zip(sizes, multiples, strict=True)):
    return (
      "the Mosaic kernel needs array sizes that are multiples of "
      f"{multiples}, got {sizes}"
    )
  return None


def _why_not_rows(rows, w, dtype: DTypeLike, *multiples: int) -> str | None:
  if len(rows) < TWO.m:
    return f"the Mosaic kernel needs at least {TWO.m} rows, got {len(rows)}"
  dtypes = jnp.bfloat16, jnp.float16
  return _why_not(rows, w, dtype, (8, *multiples), dtypes)


def _why_not_weights(x, g, dtype: DTypeLike, *multiples: int) -> str | None:
  dtypes = jnp.bfloat16, jnp.float16, jnp.float32
  return _why_not(x, g, dtype, multiples, dtypes)


# --- FP8 ---------------------------------------------------------------------


def _why_not_codes(rows, w, dtype: DTypeLike) -> str | None:
  sizes = BLOCK, BLOCK, BLOCK
  return supported.why_not_fp8(rows.dtype, w.dtype) or _why_not_rows(
    rows, w, dtype, *sizes
  )


@kernel(lambda x, w, dtype, **_: _why_not_codes(x.rows, w.columns, dtype))
def grouped_linear_fwd(
  x: Operand,
  w: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_linear_fwd`."""
  scale = x.scale * w.scale  # pyright: ignore[reportOperatorIssue]
  how = How(interpret=interpret)
  return rows_product(x.rows, w.columns, sizes, dtype, how, scale=scale)


@kernel(lambda g, w, dtype, **_: _why_not_codes(g.rows, w.rows, dtype))
def grouped_linear_dgrad(
  g: Operand,
  w: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_linear_dgrad`."""
  scale = g.scale * w.scale  # pyright: ignore[reportOperatorIssue]
  how = How(interpret=interpret)
  return rows_product(g.rows, w.rows, sizes, dtype, how, scale=scale)


def _why_not_columns(x, g, dtype: DTypeLike) -> str | None:
  sizes = (BLOCK,) * 4
  return supported.why_not_fp8(x.dtype, g.dtype) or _why_not_weights(
    x, g, dtype, *sizes
  )


@kernel(lambda x, g, dtype, **_: _why_not_columns(x.columns, g.columns, dtype))
def grouped_linear_wgrad(
  x: Operand,
  g: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_linear_wgrad`."""
  scale = jnp.broadcast_to(x.scale * g.scale, sizes.shape)  # pyright: ignore
  how = How(interpret=interpret)
  return weights_product(
    x.columns, g.columns, sizes, dtype, rows_first, how, scale=scale
  )


# --- BF16 and f16 ------------------------------------------------------------

_DEPTH = BLOCK // 2  # Length of a block along the summed axis.


def _why_not_16_bits(a, b) -> str | None:
  if a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16):
    return None
  got = f"{a.dtype} and {b.dtype}"
  return f"the kernel multiplies two BF16 or two f16 arrays, got {got}"


def _padded(x: Array, *multiples: int) -> Array:
  """Pads the last axes of x with zeros to multiples of these numbers."""
  sizes = x.shape[-len(multiples) :]
  ends = [(0, -n % by) for n, by in zip(sizes, multiples, strict=True)]
  if not any(after for _, after in ends):
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - len(ends)) + ends)


@kernel(
  lambda x, w, dtype, **_: (
    _why_not_16_bits(x, w) or _why_not_rows(x, w, dtype, 1, 1, 1)
  )
)
def grouped_fwd(
  x: Array,
  w: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_fwd`."""
  how, n = How(interpret=interpret), w.shape[2]
  x, w = _padded(x, _DEPTH), _padded(w, _DEPTH, BLOCK)
  return rows_product(x, w, sizes, dtype, how, k_first=True)[:, :n]


@kernel(
  lambda g, w, dtype, **_: (
    _why_not_16_bits(g, w) or _why_not_rows(g, w, dtype, 1, 1, 1)
  )
)
def grouped_dgrad(
  g: Array,
  w: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_dgrad`."""
  how, n = How(interpret=interpret), w.shape[1]
  g, w = _padded(g, _DEPTH), _padded(w, BLOCK, _DEPTH)
  return rows_product(g, w, sizes, dtype, how)[:, :n]


@kernel(
  lambda x, g, dtype, **_: (
    _why_not_16_bits(x, g) or _why_not_weights(x, g, dtype, 1, 1, 1, 1)
  )
)
def grouped_wgrad(
  x: Array,
  g: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
  interpret: bool = False,
) -> Array:
  """Computes `ops.grouped_wgrad`."""
  how, d, f = How(interpret=interpret), x.shape[1], g.shape[1]
  x, g = _padded(x, _DEPTH, BLOCK), _padded(g, _DEPTH, BLOCK)
  dw = weights_product(x, g, sizes, dtype, rows_first, how)
  return dw[:d, :, :f] if rows_first else dw[:, :d, :f]


# --- FP8 and 16 bits ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class How:
  """Options of a grouped matmul kernel.

  Attributes:
    tile: tile of the result. By default, `rows_product` takes THREE (TWO if
      there are few rows), and `weights_product` GRADIENT or F32_GRADIENT.
    programs: number of programs; None starts one per multiprocessor.
    interpret: whether to run the kernel on a CPU and report races.
  """

  tile: Tile | None = None
  programs: int | None = None
  interpret: bool = False


def rows_product(
  x, w, sizes, dtype, how: How = How(), *, scale=None, k_first=False
) -> Array:
  """Multiplies rows of x [M, K] by their group's w^T; returns [M, N].

  w is [E, N, K]. With `k_first`, w is [E, K, N] and is not transposed. If
  `scale` [E] is passed, each group's result is multiplied by its scale.
  """
  m, k = x.shape
  n = w.shape[2 if k_first else 1]
  depth = in_128_bytes(x.dtype)
  # On an H200, THREE is up to 20 % faster than TWO.
  tile = how.tile or THREE
  tile = tile if m >= tile.m else TWO
  tiles_n = n // BLOCK
  table = tiles_of_rows(sizes, m=m, tile_m=tile.m, blocks=k // depth)
  work = Work(
    tile=tile,
    tiles=tiles_n,
    tiles_n=tiles_n,
    depth=depth,
    a_k_first=False,
    b_k_first=k_first,
    programs=how.programs or device.multiprocessors(),
    interpret=how.interpret,
  )
  out = jax.ShapeDtypeStruct((m, n), dtype)
  return _run(grouped_rows, work, table, sizes, scale, x, w, out)


def weights_product(
  x,
  g,
  sizes,
  dtype,
  rows_first=False,
  how: How = How(),
  *,
  scale=None,
) -> Array:
  """Computes x^T g over the rows of each group; returns [E, D, F].

  In 16 bits, x is [M, D] and g is [M, F]. In FP8, x is [D, M] and g is [F, M].
  If `scale` [E] is passed, each group's result is multiplied by its scale. With
  `rows_first`, the result is [D, E, F].
  """
  k_first = not is_fp8(x.dtype)
  axis = 1 if k_first else 0
  d, f, e = x.shape[axis], g.shape[axis], len(sizes)
  depth = in_128_bytes(x.dtype)
  tile = how.tile or (
    F32_GRADIENT if jnp.dtype(dtype) == jnp.float32 else GRADIENT
  )
  programs = how.programs or device.multiprocessors()
  tiles_n = f // BLOCK
  tiles = pl.cdiv(d, tile.m) * tiles_n
  run = 1
  if not k_first:
    run = max(min(e * tiles // (_FEWEST_TILES * programs), _MOST_GROUPS), 1)
  work = Work(
    tile=tile,
    tiles=tiles,
    tiles_n=tiles_n,
    run=run,
    rows_first=rows_first,
    depth=depth,
    a_k_first=k_first,
    b_k_first=k_first,
    programs=programs,
    interpret=how.interpret,
  )
  out = jax.ShapeDtypeStruct((d, e, f) if rows_first else (e, d, f), dtype)
  table = (
    blocks_of_tokens(sizes, depth),
    jnp.full(1, pl.cdiv(e, run), jnp.int32),
  )
  return _run(grouped_gradient, work, table, sizes, scale, x, g, out)


def _run(parts, work: Work, table, sizes, scale, a, b, out) -> Array:
  if scale is None:
    scale = jnp.ones(sizes.shape)
  dtypes = a.dtype, b.dtype, out.dtype
  kernel = wgmma.kernel(
    functools.partial(grouped_kernel.run, work, parts.load, parts.compute),
    out_type=out,
    scratch_types=grouped_kernel.scratch(work, *dtypes)._asdict(),
    grid=(work.programs,),
    grid_names=("program",),
    warpgroups=work.tile.warpgroups,
    interpret=work.interpret,
    kernel_name="grouped_product",
  )
  return kernel(*table, scale.astype(jnp.float32), a, b)
