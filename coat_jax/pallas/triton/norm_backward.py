# SPDX-License-Identifier: Apache-2.0
"""The gradient of a norm of FP8 values: `ops.norm_bwd`, in Triton.

  dx = (g - xhat mean(xhat g) - mean(g)) rstd [+ add],  g = gamma dy
  dgamma = sum(dy xhat), dbeta = sum(dy) over rows  ("rms": no means of x and g)

A program handles whole rows, padded to a power of two, `rows` of them at a
time. It works down `steps` such tiles, loads one while it works on the previous
one, and keeps its sums over rows in registers. XLA then adds up the programs'
sums, always in the same order.

      +----------------+
      | rows x D       | step 0 -.
      +----------------+          >  one row of dgamma and of dbeta
      |      ...       | step 1 -'
      +----------------+

Bytes per element with dy and dx in BF16: 2 + 1 + 2 / G + 2, and 2 more for
`add`; the sums of 132 programs add 8 * 132 / m, twice that with a mean. On an
H200 (2026-11-21, jax 0.11.2, [8192, 4096], G = 16, `add`) it takes 73
microseconds, 3.3 TB/s. Without loading ahead it takes 85, and 123 among a
layer's other kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import NormStats
from coat_jax.pallas.triton import norm, tiles


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The rows that a program handles.

  Attributes:
    rows: number of rows in registers at a time, a power of two.
    steps: number of such tiles that follow one another.
    warps: number of warps that share a chunk.
    ahead: whether the next tile is loaded during work on the current one.
  """

  rows: int
  steps: int
  warps: int
  ahead: bool


def pick_chunk(m: int, n: int) -> Chunk:
  """Picks about 4096 values at a time, 8 per thread, one program per SM."""
  width = pl.next_power_of_2(n)
  rows = max(4096 // width, 1)
  # Twice the values per thread leave no registers to load the next tile.
  return Chunk(rows, pl.cdiv(m, 132 * rows), 16, ahead=width <= 4096)


def _why_not(dy, x, dtype, add, **_) -> str | None:
  return (
    tiles.why_not_format(x.qvalue.dtype, E4M3, E5M2)
    or tiles.why_not_dtype(dy.dtype, dtype)
    or (None if add is None else tiles.why_not_dtype(add.dtype))
    or norm.why_not_rows(x.qvalue.shape, x.group_size)
  )


@kernel(_why_not)
def norm_bwd(
  dy: Array,
  x: QTensor,
  gamma: Array | None,
  stats: NormStats,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """`ops.norm_bwd`."""
  n, group_size = dy.shape[-1], x.group_size
  chunk = pick_chunk(dy.size // n, n)
  return _norm_bwd(
    dy, x, gamma, stats, add, group_size, jnp.dtype(dtype), chunk, interpret
  )


@functools.partial(
  jax.jit, static_argnames=("group_size", "dtype", "chunk", "interpret")
)
def _norm_bwd(
  dy, x, gamma, stats, add, group_size, dtype, chunk: Chunk, interpret
) -> tuple[Array, Array, Array]:
  n = dy.shape[-1]
  m, width = dy.size // n, pl.next_power_of_2(n)
  height = chunk.rows * chunk.steps
  programs = pl.cdiv(m, height)
  rows = pl.BlockSpec((height, width), lambda i: (i, 0))
  groups = pl.BlockSpec((height, width // group_size), lambda i: (i, 0))
  per_row = pl.BlockSpec((height,), lambda i: (i,))
  mean = None if stats.mean is None else stats.mean.reshape(m)
  # Without a mean there is seldom a beta. Its sum would cost registers here,
  # whereas XLA drops it for free if it is unused.
  sums = jax.ShapeDtypeStruct((programs, n), jnp.float32)
  sums_spec = pl.BlockSpec((1, width), lambda i: (i, 0))
  dx, dgamma, dbeta = pl.pallas_call(
    functools.partial(_bwd_kernel, shape=(m, n), g=group_size, chunk=chunk),
    grid=(programs,),
    in_specs=[
      rows,
      rows,
      groups,
      None if gamma is None else pl.BlockSpec((width,), lambda i: (0,)),
      None if mean is None else per_row,
      per_row,
      None if add is None else rows,
    ],
    out_specs=[rows, sums_spec, None if mean is None else sums_spec],
    out_shape=[
      jax.ShapeDtypeStruct((m, n), dtype),
      sums,
      None if mean is None else sums,
    ],
    compiler_params=tiles.compiler_params(chunk.warps),
    interpret=interpret,
    name="norm_bwd",
  )(
    dy.reshape(m, n),
    x.qvalue.reshape(m, n),
    x.scale.reshape(m, n // group_size),
    gamma,
    mean,
    stats.rstd.reshape(m),
    None if add is None else add.reshape(m, n),
  )
  if dbeta is None:
    dbeta = dy.reshape(m, n).astype(jnp.float32)
  return dx.reshape(dy.shape), jnp.sum(dgamma, axis=0), jnp.sum(dbeta, axis=0)


def _bwd_kernel(*refs, shape, g, chunk):
  *refs, dx_ref, dgamma_ref, dbeta_ref = refs
  dy_ref, q_ref, scale_ref, gamma_ref, mean_ref, rstd_ref, add_ref = refs
  m, n = shape
  width = q_ref.shape[-1]
  first = pl.program_id(0) * chunk.steps
  gamma = norm.vector(gamma_ref, n)
  # The last program may have fewer steps.
  steps = jnp.minimum(chunk.steps, pl.cdiv(m, chunk.rows) - first)

  def at(ref, k, columns):
    """Returns the tile of rows of a step, and the mask of values inside."""
    tile = ref.at[pl.ds(k * chunk.rows, chunk.rows)]
    axes = (m,) if columns is None else (m, columns)
    index = (first + k, 0)[: len(axes)]
    return tile, tiles.inside(tile.shape, axes, index)

  def load(k) -> list:
    """Loads everything that a step reads, in the dtypes stored in memory."""
    return [
      None if ref is None else tiles.load(*at(ref, k, columns), dtype=ref.dtype)
      for ref, columns in (
        (dy_ref, n),
        (q_ref, n),
        (scale_ref, n // g),
        (mean_ref, None),
        (rstd_ref, None),
        (add_ref, n),
      )
    ]

  def step(k, carry):
    loaded, sums = carry
    if chunk.ahead:
      following = load(jnp.minimum(k + 1, steps - 1))
    else:
      loaded, following = load(k), None
    dy, codes, scale, mean, rstd, add = loaded
    dy = dy.astype(jnp.float32)
    x = tiles.dequantize_groups(codes, scale, group_size=g)
    if mean is not None:
      x = x - mean[:, None]
    xhat = x * rstd[:, None]
    gradient = dy if gamma is None else dy * gamma
    dx = gradient - xhat * (jnp.sum(xhat * gradient, axis=-1) / n)[:, None]
    if mean is not None:
      dx = dx - (jnp.sum(gradient, axis=-1) / n)[:, None]
    dx = dx * rstd[:, None]
    if add is not None:
      dx = dx + add.astype(jnp.float32)
    rows, mask = at(dx_ref, k, n)
    tiles.store(rows, dx, mask)
    terms = (dy * xhat, dy)[: len(sums)]
    return following, [a + b for a, b in zip(sums, terms, strict=True)]

  refs = [ref for ref in (dgamma_ref, dbeta_ref) if ref is not None]
  zeros = jnp.zeros((chunk.rows, width), jnp.float32)
  first_tile = load(0) if chunk.ahead else None
  carry = first_tile, [zeros for _ in refs]
  _, sums = jax.lax.fori_loop(0, steps, step, carry)
  mask = tiles.inside((1, width), (1, n), (0, 0))
  for ref, total in zip(refs, sums, strict=True):
    tiles.store(ref, jnp.sum(total, axis=0)[None, :], mask)
