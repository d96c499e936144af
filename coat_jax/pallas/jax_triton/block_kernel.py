# SPDX-License-Identifier: Apache-2.0
"""The kernel of `block_product`, in Triton's language; imports triton."""

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
  """out [m, n] = a [m, k] b [n, k]^T, k in blocks of 128 with scales.

  Args:
    a_ref, b_ref: codes, what is summed over last.
    a_scale_ref: f32 [k / 128, m].
    b_scale_ref: f32 [k / 128, b_rows], one for each b_height rows of b.
    add_ref: [m, n], added in f32 where has_add; else any array.
    out_ref: [m, n].
    tile_m, tile_n: of out, that one program computes.
    band: tiles along m that programs go through before the next along n, so
      that those that run together read the same b.
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
  # Past the last row the first ones are read again, and nothing is written.
  a_rows, b_columns = rows % m, columns % n
  a_at = a_ref + a_rows.to(tl.int64)[:, None] * k + inner[None, :]
  b_at = b_ref + b_columns.to(tl.int64)[None, :] * k + inner[:, None]
  a_scale_at = a_scale_ref + a_rows
  b_scale_at = b_scale_ref + b_columns // b_height
  total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
  for _ in range(k // block):
    partial = tl.dot(tl.load(a_at), tl.load(b_at))
    # Tensor cores sum a block with fewer bits than f32 has; blocks are summed
    # in f32 here.
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
