# SPDX-License-Identifier: Apache-2.0
"""Loads, quantizes and stores groups or tiles, for memory-bound kernels.

Each program (thread block) consists of one warpgroup of 128 threads, or of
several in `tiles.run`. A warpgroup's registers hold either groups or a tile:

  groups  [count, G], with G = 16 to 128 values per group. A lane holds 8
          adjacent values (16 bytes in BF16), so at most four shuffles find a
          group's largest magnitude. Because rows are contiguous and consist of
          whole groups, kernels treat a matrix as one list of groups. In kernels
          that need whole rows (`whole_rows`), a lane may hold 4 or 2 values.
  tile    [64, 128] or [32, 128]; see `tiles`

Mosaic has no masked loads or stores. A program that would reach past the end of
the array starts earlier instead, so some values are written twice.

The interpreter cannot run inline PTX (`row_ptx`). With `interpret`, functions
run jnp code instead, which defines what the PTX must compute.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax
from coat_jax.pallas.mosaic import row_ptx
from coat_jax.pallas.mosaic.magnitudes import group_scale, magnitude_bits
from coat_jax.pallas.mosaic.row_ptx import LANES, VECTOR, WARPS

STEP = WARPS * LANES * VECTOR  # Number of values per load.


def run(
  kernel: Callable[..., None],
  inputs: Sequence[Array | None],
  outputs: Sequence[jax.ShapeDtypeStruct | None],
  *,
  grid: tuple[int, ...],
  interpret: bool,
  **options,
) -> list:
  """Runs `kernel(*refs)`; returns the outputs.

  `refs` refer to the inputs, outputs and scratch arrays, in this order. If an
  input or output is None, its ref is None, and so is the returned output. By
  default, the grid's axes are named "across" and "last", or just "last".
  Programs with consecutive indices along "last" start one after the other.
  `options` are further options of `plgpu.kernel`.
  """
  options.setdefault("grid_names", ("across", "last")[-len(grid) :])
  present = [x is not None for x in (*inputs, *outputs)]

  def body(*refs):
    left = iter(refs)
    kernel(
      *(next(left) if is_present else None for is_present in present), *left
    )

  found = plgpu.kernel(
    body,
    out_type=[x for x in outputs if x is not None],
    grid=grid,
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      # Kernels and functions in `row_ptx` emit the barriers that they need.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
    **options,
  )(*(x for x in inputs if x is not None))
  left = iter(found)
  return [None if x is None else next(left) for x in outputs]


def store(ref, x: Array) -> None:
  """Stores x, even if its layout does not fill whole cache lines."""
  # Since JAX 0.12, an assignment rejects such a layout.
  if hasattr(plgpu, "store"):
    plgpu.store(ref, x, optimized=False)  # pyright: ignore
  else:
    ref[...] = x


def pick_size(elements: int, loads: int = 4) -> int:
  """Picks how many values a program loads, fewer in small arrays."""
  return loads * STEP if elements >= 2**20 else STEP


def part(axis: str, size: int, count: int):
  """Returns this program's slice along a grid axis; see `part_at`."""
  return part_at(lax.axis_index(axis), size, count)


def part_at(index: Array, size: int, count: int):
  """Cuts `count` indices into slices of `size`; returns slice number `index`.

  The last slice starts earlier if it would otherwise reach past the end, so
  `count` must be at least `size`.
  """
  start = index * size
  if count % size:
    start = jnp.minimum(start, count - size)
  return pl.ds(start, size)


def why_not_list(shape: tuple[int, ...]) -> str | None:
  """Returns why an array of this shape is too small for a program, or None."""
  size = math.prod(shape)
  if size < STEP:
    return f"the Mosaic kernel needs at least {STEP} values, got {size}"
  return None


# --- Groups ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
  """How a program loads groups of `size` values, with `vector` per lane."""

  size: int
  vector: int = VECTOR

  @property
  def count(self) -> int:
    """The number of groups per load."""
    return WARPS * LANES * self.vector // self.size

  @property
  def layout(self):
    """The layout of groups [count, size]; scales have `layout.reduce(1)`."""
    groups = LANES * self.vector // self.size  # Per warp.
    if groups == 1:
      return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, self.size), (self.vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
      )
    return plgpu.Layout.TILED(
      plgpu.Tiling(
        ((WARPS * groups, self.size), (groups, self.size), (self.vector,))
      ),
      warp_dims=(-5,),
      lane_dims=(-3, -2),
      vector_dim=-1,
    )


ANY = Load(16)  # For arrays that are not quantized in groups.


def load_groups(ref, load: Load) -> Array:
  """Loads groups [c, G] as f32, where c is a multiple of `load.count`."""
  x = plgpu.load(ref, layout=load.layout, optimized=False)
  return x.astype(jnp.float32)


def amax_bits(x: Array, count: int) -> Array:
  """Returns the f32 bits of the largest magnitude, as int32 []."""
  # Within a lane, compare as f32, which takes one instruction and keeps NaN.
  # Comparing bits would take two.
  bits = magnitude_bits(folded(jnp.maximum, jnp.abs(x), count))
  while bits.ndim:
    bits = jnp.max(bits, axis=-1)
  return bits


def folded(op: Callable, x: Array, count: int) -> Array:
  """Reduces x to `count` rows, by combining rows i, i + count, ... with `op`.

  If a load reads `count` rows, each lane already holds the values to combine.
  """
  loads = [x[i : i + count] for i in range(0, len(x), count)]
  return functools.reduce(op, loads)


def quantize_groups(
  x: Array, dtype: DTypeLike, load: Load, interpret: bool
) -> tuple[Array, Array]:
  """Quantizes groups [..., G] to codes and f32 scales [...].

  Scales are rounded up to BF16, so quotients need no clipping.
  """
  bits = magnitude_bits(jnp.max(jnp.abs(x), axis=-1))
  scale = group_scale(bits, dtype)
  wide = spread(scale, x.shape)
  if interpret:
    return (x / wide).astype(dtype), scale
  quotient = row_ptx.quotient(x, wide, None, load.layout)
  return quotient.astype(dtype), scale


def quantize(
  x: Array, scale: Array, dtype: DTypeLike, layout, interpret: bool
) -> Array:
  """Rounds clip(x / scale, ±qmax) to nearest even; `scale` is a scalar."""
  limit = qmax(dtype)
  if interpret:
    return jnp.clip(x / scale, -limit, limit).astype(dtype)
  scale = plgpu.layout_cast(jnp.broadcast_to(scale, x.shape), layout)
  # The GPU's cast saturates at `limit`, so clipping to 2 * limit is enough.
  return row_ptx.quotient(x, scale, 2 * limit, layout).astype(dtype)


def dequantize_groups(codes: Array, scale: Array) -> Array:
  """Dequantizes codes [..., G] with scales [...] to f32."""
  return codes.astype(jnp.float32) * spread(scale, codes.shape)


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
  """Broadcasts scales of leading axes to `shape`, along the last axes."""
  return lax.broadcast_in_dim(scale, shape, range(scale.ndim))


def barrier(interpret: bool) -> None:
  """Waits until all threads of the warpgroup have arrived."""
  if not interpret:
    row_ptx.barrier()
