# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind `block_product`; importing this imports triton."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def product(
  a_ref,
  a_scale_ref,
  b_ref,
  b_scale_ref,
  add_ref,
  out_ref,
  m: tl.constexpr,
  n: tl.constexpr,
  k: tl.constexpr,
  b_rows: tl.constexpr,
  b_height: tl.constexpr,
  has_add: tl.constexpr,
  tile_m: tl.constexpr,
  tile_n: tl.constexpr,
  band: tl.constexpr,
):
  """Computes out [m, n] = a [m, k] b [n, k]^T, k in scaled blocks of 128.

  Args:
    a_ref, b_ref: FP8 codes; the axis that is summed over is last.
    a_scale_ref: f32 [k / 128, m].
    b_scale_ref: f32 [k / 128, b_rows], one scale per b_height rows of b.
    add_ref: [m, n], added in f32 if has_add; otherwise any array.
    out_ref: [m, n].
    tile_m, tile_n: size of the tile of out that one program computes.
    band: number of tiles along m that programs work through before they move
      on along n, so that programs that run at the same time read the same b.
  """
  block: tl.constexpr = 128
  program = tl.program_id(0)
  tiles_m = tl.cdiv(m, tile_m)
  tiles_n = tl.cdiv(n, tile_n)
  first = program // (band * tiles_n) * band
  height = min(tiles_m - first, band)
  within = program % (band * tiles_n)
  rows = (first + within % height) * tile_m + tl.arange(0, tile_m)
  columns = within // height * tile_n + tl.arange(0, tile_n)
  inner = tl.arange(0, block)
  # Rows past the end wrap around and read the first rows again; they are not
  # written.
  a_rows, b_columns = rows % m, columns % n
  a_at = a_ref + a_rows.to(tl.int64)[:, None] * k + inner[None, :]
  b_at = b_ref + b_columns.to(tl.int64)[None, :] * k + inner[:, None]
  a_scale_at = a_scale_ref + a_rows
  b_scale_at = b_scale_ref + b_columns // b_height
  total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
  for _ in range(k // block):
    partial = tl.dot(tl.load(a_at), tl.load(b_at))
    # Tensor cores sum a block with fewer bits than f32, so we add up the
    # blocks in f32 here.
    scale = tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
    total += partial * scale
    a_at += block
    b_at += block
    a_scale_at += m
    b_scale_at += b_rows
  out_at = rows.to(tl.int64)[:, None] * n + columns[None, :]
  inside = (rows < m)[:, None] & (columns < n)[None, :]
  if has_add:
    total += tl.load(add_ref + out_at, mask=inside, other=0).to(tl.float32)
  tl.store(out_ref + out_at, total.to(out_ref.dtype.element_ty), mask=inside)
