# SPDX-License-Identifier: Apache-2.0
"""FP8 products of groups of rows on Hopper's tensor cores, through Mosaic GPU.

  grouped_linear_fwd     y  = x w      [M, D] x [E, F, D]^T -> [M, F]
  grouped_linear_dgrad   dx = g w^T    [M, F] x [E, D, F]^T -> [M, D]
  grouped_linear_wgrad   dw = x^T g    [D, M] x [F, M]^T, per group's tokens

Both operands have the summed axis last, as the tensor cores need it. The scales
of both operands are multiplied with each other first: if their product is below
1.2e-38 it is inexact or 0, whereas the definition in `ops.grouped_linear` still
computes a value. For a group's weight gradient, x is set to zero at tokens of
other groups, but g is not: if g has a finite scale but codes that are not
finite, they also reach the group before and after.

No GPU has run these kernels yet, so they run only if `implementation="mosaic"`
names them. `python -m benchmarks.grouped_products` measures them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.formats import is_fp8
from coat_jax.numerics.scaling import BLOCK, Operand
from coat_jax.ops.dispatch import kernel
from coat_jax.pallas.mosaic import device, grouped_kernel
from coat_jax.pallas.mosaic.grouped_kernel import Entry, Tile, Work
from coat_jax.pallas.mosaic.persistent import WARPGROUPS

TILES = {"tall": Tile(), "low": Tile(waves=1, stages=5, band=16)}
# With the tile "tall", ptxas spills 132 bytes where it clears tokens.
_OF_WEIGHTS = TILES["low"]


def pick_tile(rows_each: int) -> Tile:
  """Picks a tile for groups with this many rows on average."""
  # A group's last tile is half empty on average.
  return TILES["tall" if rows_each >= 4 * TILES["tall"].m else "low"]


def _why_not(a, b, dtype: DTypeLike, multiples: tuple, dtypes) -> str | None:
  """Returns why this GPU cannot multiply codes a and b [..., k], or None."""
  reason = device.why_not()
  if reason is not None:
    return reason
  if jnp.dtype(dtype) not in dtypes:
    names = " or ".join(jnp.dtype(each).name for each in dtypes)
    return f"the kernel writes {names}, got {jnp.dtype(dtype)}"
  if not (is_fp8(a.dtype) and is_fp8(b.dtype)):
    return f"the kernel multiplies FP8, got {a.dtype} and {b.dtype}"
  sizes = *a.shape, *b.shape[-2:]
  if any(n % of or n == 0 for n, of in zip(sizes, multiples, strict=True)):
    return (
      "the kernel of Mosaic takes codes whose sizes are multiples of "
      f"{multiples}, got {sizes}"
    )
  return None


def _why_not_rows(x: Operand, codes, dtype: DTypeLike) -> str | None:
  rows = x.rows
  assert rows is not None
  if len(rows) < TILES["low"].m:
    return f"the kernel of Mosaic takes at least 128 rows, got {len(rows)}"
  multiples = 8, BLOCK, BLOCK, BLOCK
  dtypes = jnp.bfloat16, jnp.float16
  return _why_not(rows, codes, dtype, multiples, dtypes)


@kernel(lambda x, w, dtype, **_: _why_not_rows(x, w.columns, dtype))
def grouped_linear_fwd(
  x: Operand,
  w: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_linear_fwd`."""
  scale = x.scale * w.scale  # pyright: ignore[reportOperatorIssue]
  how = How(interpret=interpret)
  return rows_product(x.rows, w.columns, sizes, scale, dtype, how)


@kernel(lambda g, w, dtype, **_: _why_not_rows(g, w.rows, dtype))
def grouped_linear_dgrad(
  g: Operand,
  w: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_linear_dgrad`."""
  scale = g.scale * w.scale  # pyright: ignore[reportOperatorIssue]
  how = How(interpret=interpret)
  return rows_product(g.rows, w.rows, sizes, scale, dtype, how)


def _why_not_wgrad(x: Operand, g: Operand, dtype, **_) -> str | None:
  dtypes = jnp.bfloat16, jnp.float16, jnp.float32
  return _why_not(x.columns, g.columns, dtype, (BLOCK,) * 4, dtypes)


@kernel(_why_not_wgrad)
def grouped_linear_wgrad(
  x: Operand,
  g: Operand,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_linear_wgrad`."""
  scale = jnp.broadcast_to(x.scale * g.scale, sizes.shape)  # pyright: ignore
  how = How(interpret=interpret)
  return weights_product(
    x.columns, g.columns, sizes, scale, dtype, rows_first, how
  )


@dataclasses.dataclass(frozen=True)
class How:
  """How a product is run.

  Attributes:
    tile: None for one that suits the sizes.
    programs: None for one per multiprocessor.
    interpret: runs the kernel on a CPU and reports races.
  """

  tile: Tile | None = None
  programs: int | None = None
  interpret: bool = False


def rows_product(x, w, sizes, scale, dtype, how: How = How()) -> Array:
  """Computes rows of x [M, K] times their group's w [E, N, K]^T: [M, N]."""
  (m, k), (e, n, _) = x.shape, w.shape
  tile = how.tile or pick_tile(m // e)
  tile = tile if m >= tile.m else TILES["low"]
  table = tiles_of_rows(sizes, m=m, tile_m=tile.m, blocks=k // BLOCK)
  work = _work(how, tile, n, of_weights=False, rows_first=False, tiles_m=0)
  out = jax.ShapeDtypeStruct((m, n), dtype)
  return _run(work, table, scale, x, w, out)


def weights_product(
  x, g, sizes, scale, dtype, rows_first=False, how: How = How()
) -> Array:
  """Computes x [D, M] g [F, M]^T over the tokens of each group: [E, D, F]."""
  (d, _), f, e = x.shape, len(g), len(sizes)
  tile = how.tile or _OF_WEIGHTS
  work = _work(
    how, tile, f, of_weights=True, rows_first=rows_first, tiles_m=d // tile.m
  )
  out = jax.ShapeDtypeStruct((d, e, f) if rows_first else (e, d, f), dtype)
  return _run(work, blocks_of_tokens(sizes), scale, x, g, out)


def _work(how: How, tile: Tile, n: int, **of_weights) -> Work:
  return Work(
    tile=tile,
    tiles_n=n // BLOCK,
    programs=how.programs or device.multiprocessors(),
    interpret=how.interpret,
    **of_weights,
  )


def _run(work: Work, table: tuple[Array, Array], scale, a, b, out) -> Array:
  dtypes = a.dtype, b.dtype, out.dtype
  kernel = plgpu.kernel(
    functools.partial(grouped_kernel.run, work),
    out_type=out,
    scratch_types=grouped_kernel.scratch(work, *dtypes)._asdict(),
    grid=(work.programs,),
    grid_names=("program",),
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
    # Threads that write to shared memory say so themselves.
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    interpret=plgpu.InterpretGPUParams(detect_races=True)
    if work.interpret
    else False,
    kernel_name="grouped_product",
  )
  return kernel(*table, scale.astype(jnp.float32), a, b)


# --- Tables ------------------------------------------------------------------


def tiles_of_rows(
  sizes: Array, *, m: int, tile_m: int, blocks: int
) -> tuple[Array, Array]:
  """Returns the table for rows times weights, and how many entries are used.

  Rows after all groups form one more group, which sums no blocks: their result
  is zero.
  """
  groups = len(sizes)
  sizes = jnp.append(sizes, m - jnp.sum(sizes)).astype(jnp.int32)
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes
  aligned = begins // 8 * 8
  counts = jnp.where(sizes > 0, pl.cdiv(ends - aligned, tile_m), 0)
  last = jnp.cumsum(counts, dtype=jnp.int32)
  # A group begins up to 7 rows early, and its last tile may hold one row.
  entries = pl.cdiv(m + 7 * (groups + 1), tile_m) + groups + 1
  tile = jnp.arange(entries, dtype=jnp.int32)
  group = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)
  group = jnp.minimum(group, groups)
  row = aligned[group] + (tile - (last - counts)[group]) * tile_m
  table = Entry(
    group=jnp.minimum(group, groups - 1),
    # The last tiles move up, so that none reaches past the last row.
    row=jnp.minimum(row, m - tile_m),
    begin=jnp.maximum(begins[group], row),
    end=jnp.minimum(ends[group], row + tile_m),
    first=jnp.zeros_like(tile),
    blocks=jnp.where(group < groups, jnp.int32(blocks), 0),
  )
  return jnp.stack(table), last[-1:]


def blocks_of_tokens(sizes: Array) -> tuple[Array, Array]:
  """Returns the table for gradients of weights, and its number of entries."""
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes.astype(jnp.int32)
  first = begins // BLOCK
  group = jnp.arange(len(sizes), dtype=jnp.int32)
  table = Entry(
    group=group,
    row=jnp.zeros_like(group),
    begin=begins,
    end=ends,
    first=first,
    blocks=jnp.where(sizes > 0, pl.cdiv(ends, BLOCK) - first, 0),
  )
  return jnp.stack(table), jnp.full(1, len(sizes), jnp.int32)
