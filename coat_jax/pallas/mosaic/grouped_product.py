# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows on Hopper's tensor cores, through Mosaic GPU.

  grouped_linear_fwd     y  = x w      [M, D] x [E, F, D]^T -> [M, F]
  grouped_linear_dgrad   dx = g w^T    [M, F] x [E, D, F]^T -> [M, D]
  grouped_linear_wgrad   dw = x^T g    [D, M] x [F, M]^T, per group's tokens

  grouped_fwd            y  = x w      [M, D] x [E, D, F] -> [M, F]
  grouped_dgrad          dx = g w^T    [M, F] x [E, D, F]^T -> [M, D]
  grouped_wgrad          dw = x^T g    [M, D]^T x [M, F], per group's tokens

The first three multiply FP8 codes, which must have the summed axis last. The
others multiply BF16 or f16 as it is stored. If a width is no multiple of a
tile's, they copy both operands with zeros appended.

The two FP8 scales are multiplied with each other first, so a product below
1.2e-38 is inexact or 0. The definition in `ops.grouped_linear` has no such
limit. In a group's weight gradient, x is zeroed at tokens of other groups, but
g is not. So NaN and infinities in g, or in its codes, also reach the group
before and after.

`python -m benchmarks.grouped_products` measures the kernels. On an H100, FP8
reaches 500 to 1030 TFLOP/s for Qwen3-30B-A3B and Mixtral-8x7B, and BF16 350 to
490. Without these kernels, XLA multiplies every row by every group's weight.

Writing weight gradients in f32 takes longer than the matmul if groups are
small. For gate and up of Qwen3-30B-A3B (512 rows for each of 128 experts) they
take 128 x 2048 x 1536 x 4 bytes = 1.61 GB, and x and g take 0.23 GB. An H100
moves 3.35 TB/s, so memory alone takes 0.55 ms. Tensor cores take 0.21 ms for
412 GFLOP at 1979 TFLOP/s. So at most 750 TFLOP/s are possible; we measured 490.
Gradients in BF16 are half as large, so memory takes 0.31 ms. Layers request
gradients in the dtype of the weights, or on a mesh in `axes.grad_dtype`.
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
from coat_jax.pallas.mosaic.persistent import WARPGROUPS, in_128_bytes

TILES = {"tall": Tile(), "low": Tile(waves=1, stages=5, band=16)}


def pick_tile(rows_each: int) -> Tile:
  """Picks a tile for groups with this many rows on average."""
  # A group's last tile is half empty on average. On an H100 the forward pass in
  # FP8 is faster with "low" at 512 rows per group (802 against 696 TFLOP/s) and
  # with "tall" at 2048 (990 against 928).
  return TILES["tall" if rows_each >= 4 * TILES["tall"].m else "low"]


def _why_not(a, b, dtype: DTypeLike, multiples: tuple, dtypes) -> str | None:
  """Returns why this GPU cannot multiply a and b, or None."""
  reason = device.why_not_hopper()
  if reason is not None:
    return reason
  if jnp.dtype(dtype) not in dtypes:
    names = " or ".join(jnp.dtype(each).name for each in dtypes)
    return f"the kernel writes {names}, got {jnp.dtype(dtype)}"
  sizes = *a.shape, *b.shape[-2:]
  if any(n % of or n == 0 for n, of in zip(sizes, multiples, strict=True)):
    return (
      "the kernel of Mosaic takes arrays whose sizes are multiples of "
      f"{multiples}, got {sizes}"
    )
  return None


def _why_not_rows(rows, w, dtype: DTypeLike, *multiples: int) -> str | None:
  if len(rows) < TILES["low"].m:
    return f"the kernel of Mosaic takes at least 128 rows, got {len(rows)}"
  dtypes = jnp.bfloat16, jnp.float16
  return _why_not(rows, w, dtype, (8, *multiples), dtypes)


def _why_not_weights(x, g, dtype: DTypeLike, *multiples: int) -> str | None:
  dtypes = jnp.bfloat16, jnp.float16, jnp.float32
  return _why_not(x, g, dtype, multiples, dtypes)


# --- FP8 ---------------------------------------------------------------------


def _why_not_fp8(*arrays) -> str | None:
  if all(is_fp8(x.dtype) for x in arrays):
    return None
  names = " and ".join(str(x.dtype) for x in arrays)
  return f"the kernel multiplies FP8, got {names}"


def _why_not_codes(rows, w, dtype: DTypeLike) -> str | None:
  sizes = BLOCK, BLOCK, BLOCK
  return _why_not_fp8(rows, w) or _why_not_rows(rows, w, dtype, *sizes)


@kernel(lambda x, w, dtype, **_: _why_not_codes(x.rows, w.columns, dtype))
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
  """`ops.grouped_linear_dgrad`."""
  scale = g.scale * w.scale  # pyright: ignore[reportOperatorIssue]
  how = How(interpret=interpret)
  return rows_product(g.rows, w.rows, sizes, dtype, how, scale=scale)


def _why_not_columns(x: Operand, g: Operand, dtype, **_) -> str | None:
  columns = x.columns, g.columns
  sizes = (BLOCK,) * 4
  return _why_not_fp8(*columns) or _why_not_weights(*columns, dtype, *sizes)


@kernel(_why_not_columns)
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
    x.columns, g.columns, sizes, dtype, rows_first, how, scale=scale
  )


# --- BF16 and f16 ------------------------------------------------------------

_HALF = BLOCK // 2  # How many values a block has along the summed axis.


def _why_not_16_bits(a, b) -> str | None:
  if a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16):
    return None
  return f"the kernel multiplies BF16 or f16, got {a.dtype} and {b.dtype}"


def _padded(x: Array, *multiples: int) -> Array:
  """Appends zeros to the last axes, up to these multiples."""
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
  """`ops.grouped_fwd`."""
  how, n = How(interpret=interpret), w.shape[2]
  x, w = _padded(x, _HALF), _padded(w, _HALF, BLOCK)
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
  """`ops.grouped_dgrad`."""
  how, n = How(interpret=interpret), w.shape[1]
  g, w = _padded(g, _HALF), _padded(w, BLOCK, _HALF)
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
  """`ops.grouped_wgrad`."""
  how, d, f = How(interpret=interpret), x.shape[1], g.shape[1]
  x, g = _padded(x, _HALF, BLOCK), _padded(g, _HALF, BLOCK)
  dw = weights_product(x, g, sizes, dtype, rows_first, how)
  return dw[:d, :, :f] if rows_first else dw[:, :d, :f]


# --- Both --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class How:
  """How a product is run.

  Attributes:
    tile: None for one that suits the sizes. Gradients of weights need one with
      a single wave: with two, ptxas spills and an H100 takes three times as
      long (864 and 294 TFLOP/s for gate and up of Mixtral-8x7B).
    programs: None for one per multiprocessor.
    interpret: runs the kernel on a CPU and reports races.
  """

  tile: Tile | None = None
  programs: int | None = None
  interpret: bool = False


def rows_product(
  x, w, sizes, dtype, how: How = How(), *, scale=None, k_first=False
) -> Array:
  """Computes rows of x [M, K] times their group's w [E, N, K]^T: [M, N].

  With `k_first`, w is [E, K, N]. `scale` [E] multiplies the result.
  """
  (m, k), e = x.shape, len(w)
  n = w.shape[2 if k_first else 1]
  depth = in_128_bytes(x.dtype)
  tile = how.tile or pick_tile(m // e)
  tile = tile if m >= tile.m else TILES["low"]
  table = tiles_of_rows(sizes, m=m, tile_m=tile.m, blocks=k // depth)
  work = Work(
    tile=tile,
    of_weights=False,
    rows_first=False,
    tiles_m=0,
    tiles_n=n // BLOCK,
    depth=depth,
    a_k_first=False,
    b_k_first=k_first,
    programs=how.programs or device.multiprocessors(),
    interpret=how.interpret,
  )
  out = jax.ShapeDtypeStruct((m, n), dtype)
  return _run(work, table, sizes, scale, x, w, out)


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
  """Computes x^T g over the tokens of each group: [E, D, F].

  x is [M, D] and g [M, F], but columns of codes are [D, M] and [F, M]. `scale`
  [E] multiplies the result.
  """
  k_first = not is_fp8(x.dtype)
  axis = 1 if k_first else 0
  d, f, e = x.shape[axis], g.shape[axis], len(sizes)
  depth = in_128_bytes(x.dtype)
  tile = how.tile or TILES["low"]
  assert tile.waves == 1, tile
  work = Work(
    tile=tile,
    of_weights=True,
    rows_first=rows_first,
    tiles_m=d // tile.m,
    tiles_n=f // BLOCK,
    depth=depth,
    a_k_first=k_first,
    b_k_first=k_first,
    programs=how.programs or device.multiprocessors(),
    interpret=how.interpret,
  )
  out = jax.ShapeDtypeStruct((d, e, f) if rows_first else (e, d, f), dtype)
  table = blocks_of_tokens(sizes, depth)
  return _run(work, table, sizes, scale, x, g, out)


def _run(work: Work, table, sizes, scale, a, b, out) -> Array:
  if scale is None:
    scale = jnp.ones(sizes.shape)
  dtypes = a.dtype, b.dtype, out.dtype
  kernel = plgpu.kernel(
    functools.partial(grouped_kernel.run, work),
    out_type=out,
    scratch_types=grouped_kernel.scratch(work, *dtypes)._asdict(),
    grid=(work.programs,),
    grid_names=("program",),
    num_threads=WARPGROUPS + 1,
    thread_name="warpgroup",
    # The kernel has its own barriers.
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

  Rows after the last group form one more group. It sums no blocks, so their
  result is zero.
  """
  groups = len(sizes)
  sizes = jnp.append(sizes, m - jnp.sum(sizes)).astype(jnp.int32)
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes
  aligned = begins // 8 * 8
  counts = jnp.where(sizes > 0, pl.cdiv(ends - aligned, tile_m), 0)
  last = jnp.cumsum(counts, dtype=jnp.int32)
  # At most, each group begins 7 rows early and has one row in its last tile.
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


def blocks_of_tokens(sizes: Array, depth: int) -> tuple[Array, Array]:
  """Returns the table for gradients of weights, and its number of entries."""
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes.astype(jnp.int32)
  first = begins // depth
  group = jnp.arange(len(sizes), dtype=jnp.int32)
  table = Entry(
    group=group,
    row=jnp.zeros_like(group),
    begin=begins,
    end=ends,
    first=first,
    blocks=jnp.where(sizes > 0, pl.cdiv(ends, depth) - first, 0),
  )
  return jnp.stack(table), jnp.full(1, len(sizes), jnp.int32)
