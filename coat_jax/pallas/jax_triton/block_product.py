# SPDX-License-Identifier: Apache-2.0
"""FP8 products in blocks of 128 on Hopper's tensor cores, through jax-triton.

  out [m, n] = sum over blocks j of k: a_j b_j^T a_scale_j b_scale_j

One program computes a tile of `out`. For each block of 128 along k, wgmma
computes the tile's partial product, which is multiplied by the two scales and
added to the running sum in f32 (arXiv:2412.19437, section 3.3.2, promotes to
f32 in the same way). Scales of a row per block, [m, k / 128], are transposed
for the kernel, so that the scales of a tile's rows are contiguous. The two
scales of a block are multiplied with each other first: if their product is
below 1.2e-38 it is inexact or 0, where the definition in `ops.linear` still has
values.

The installed triton compiles `block_kernel.py` when a program that uses it is
lowered. Triton 3.9 compiles the product to wgmma.mma_async m64n128k32, for
both E4M3 and E5M2; docs/extending.md shows how to compile it for an H200
without having one. On an H200 (2026-11-23, jax 0.11.2, triton 3.9.0, products
of Llama-2-7B with 8192 tokens) it reaches 570 to 680 TFLOP/s for the forward
and for the gradient of x, and 400 to 430 for the gradient of w, where both
operands have a scale for each row.
"""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import is_fp8
from coat_jax.ops.blocks import BLOCK
from coat_jax.ops.dispatch import supported
from coat_jax.ops.linear import in_columns, in_rows, in_sum
from coat_jax.ops.types import BlockScales, Operand, Unsupported
from coat_jax.qtensor import QTensor

# JAX 0.11.2 ships the assembler of CUDA 13.0, which supports PTX up to 9.0;
# triton 3.9 emits 9.4 by default.
PTX_VERSION = 90


@dataclasses.dataclass(frozen=True)
class Tile:
  """The shape of a tile and how one program computes it.

  Attributes:
    m, n: size of the tile of the result that one program computes.
    band: number of tiles along m that run together.
    num_warps, num_stages: of one program; a stage is one block in flight.
  """

  m: int
  n: int
  band: int = 8
  num_warps: int = 8
  num_stages: int = 4

  def programs(self, m: int, n: int) -> int:
    """Returns the number of programs for a result [m, n]."""
    return math.ceil(m / self.m) * math.ceil(n / self.n)


def pick_tile(m: int) -> Tile:
  """Picks a tile for [m, n]; it has fewer rows if m is small."""
  return Tile(128, 128) if m > 64 else Tile(64, 128, num_warps=4)


def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
  bias: Array | None = None,
) -> Array:
  """`ops.linear_fwd`; XLA adds the bias in a separate pass."""
  _require("linear_fwd", x, w, dtype)
  rows = in_rows(x)
  _require_sizes("linear_fwd", rows, in_columns(w))
  supported()
  if bias is None:
    y = _product(rows, in_columns(w), dtype, add)
  else:
    y = _product(rows, in_columns(w), jnp.float32, add)
    y = in_sum(y, dtype, None, bias)
  assert x.rows is not None
  return y.reshape(*x.rows.shape[:-1], y.shape[-1])


def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """`ops.linear_dgrad`."""
  _require("linear_dgrad", g, w, dtype)
  _require_sizes("linear_dgrad", in_rows(g), in_rows(w))
  supported()
  dx = _product(in_rows(g), in_rows(w), dtype)
  assert g.rows is not None
  return dx.reshape(*g.rows.shape[:-1], dx.shape[-1])


def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """`ops.linear_wgrad`."""
  _require("linear_wgrad", x, g, dtype)
  _require_sizes("linear_wgrad", in_columns(x), in_columns(g))
  supported()
  return _product(in_columns(x), in_columns(g), dtype)


def _require(op: str, a: Operand, b: Operand, dtype: DTypeLike) -> None:
  """Raises `Unsupported` without block scales or without jax-triton."""
  if not all(isinstance(x.scale, BlockScales) for x in (a, b)):
    raise Unsupported(
      f"{op}: the kernel of jax-triton takes scales of blocks of {BLOCK}, got "
      "one scale per tensor"
    )
  missing = [x for x in ("triton", "jax_triton") if not _is_installed(x)]
  if missing:
    raise Unsupported(
      f"{op}: products in blocks of {BLOCK} have a kernel in Triton, got no "
      f"module {' and no module '.join(missing)}; pip install "
      '"coat_jax[triton]"'
    )
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise Unsupported(
      f"{op}: the kernel writes bfloat16, float16 or float32, got {dtype}"
    )


def _require_sizes(op: str, a: QTensor, b: QTensor) -> None:
  """Raises `Unsupported` for formats and sizes that the kernel cannot take."""
  dtypes = {a.qvalue.dtype, b.qvalue.dtype}
  if len(dtypes) > 1 or not all(map(is_fp8, dtypes)):
    raise Unsupported(
      f"{op}: the kernel multiplies FP8 of one format, got "
      f"{' and '.join(sorted(x.name for x in dtypes))}"
    )
  (m, k), n = a.qvalue.shape, len(b.qvalue)
  if k % BLOCK or 0 in (m, n, k):
    raise Unsupported(
      f"{op}: the kernel sums over whole blocks of {BLOCK}, got [{m}, {k}] "
      f"times [{k}, {n}]"
    )


def _is_installed(module: str) -> bool:
  return importlib.util.find_spec(module) is not None


def _product(
  a: QTensor, b: QTensor, dtype: DTypeLike, add: Array | None = None
) -> Array:
  """Computes a [m, k] b [n, k]^T."""
  import jax_triton  # pyright: ignore[reportMissingImports]

  from coat_jax.pallas.jax_triton import block_kernel

  (m, k), n = a.qvalue.shape, len(b.qvalue)
  tile, out = pick_tile(m), jax.ShapeDtypeStruct((m, n), dtype)
  b_rows = len(b.scale)
  call = jax_triton.triton_call  # pyright: ignore[reportAttributeAccessIssue]
  return call(
    a.qvalue,
    a.scale.T,
    b.qvalue,
    b.scale.T,
    a.scale if add is None else add.reshape(m, n),
    kernel=block_kernel.product,
    out_type=out,
    grid=(tile.programs(m, n),),
    name="block_product",
    num_warps=tile.num_warps,
    num_stages=tile.num_stages,
    backend_options=dict(ptx_version=PTX_VERSION),
    m=m,
    n=n,
    k=k,
    b_rows=b_rows,
    b_height=1 if b_rows == n else BLOCK,
    has_add=add is not None,
    tile_m=tile.m,
    tile_n=tile.n,
    band=tile.band,
  )
