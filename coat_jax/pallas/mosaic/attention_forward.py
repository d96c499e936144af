# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of attention.

A program computes the output for 128 queries of one head, and loops over tiles
of keys. Each of two warpgroups computes the scores of 64 queries, and then the
exponentials p of the scores, relative to a running maximum (if needed). p stays
in registers, and the product of p and the values is added to f32 sums. While
one warpgroup computes p, the other can use the tensor cores.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.pallas.mosaic import attention_tiles as tiles
from coat_jax.pallas.mosaic.attention_tiles import Scores, Work
from coat_jax.pallas.mosaic.ring import Ring
from coat_jax.pallas.mosaic.wgmma import (
  ROWS,
  WARPGROUPS,
  swizzled_rows,
)

# If scores are within ±55, exponentials are between 2^-80 and 2^80. So none
# underflows, and a sum of 2^40 exponentials does not overflow.
_NEEDS_NO_MAXIMUM = 55.0
_MASKED = -1e30
# The running maximum starts at _LEAST, below every score and above every masked
# score. So p is 0 as long as all of a query's keys are masked. If the maximum
# started at -inf, a query whose keys are all masked would have the maximum
# _MASKED * unit, rounded to f32. `Scores.exponential` computes this product
# without rounding it (in an fma), and subtracts the maximum. The difference
# could be 1e22, and p = 2^difference would be infinite.
_LEAST = -1e20


def forward(work: Work, q, k, v, segments: tuple) -> tuple[Array, Array]:
  """Returns the output [B, T, N, H] and lse, f32 [B, N, tiles * own].

  lse is undefined past `work.length`.
  """
  b, _, n, h = q.shape
  return tiles.run(
    work,
    functools.partial(_forward, work),
    *(q, k, v, *segments),
    heads=n,
    out=(
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((b, n, work.tiles * work.own), jnp.float32),
    ),
    scratch={
      "q_smem": swizzled_rows(work.own, h, dtype=q.dtype),
      "q_loaded": plgpu.Barrier(),
      "ring": tiles.ring(work, q.dtype),
    },
    name="attention_fwd",
  )


def _forward(work: Work, *refs, q_smem, q_loaded, ring: Ring) -> None:
  q, k, v, *segments, out, lse = refs
  b, head = lax.axis_index("batch"), lax.axis_index("head")
  own = pl.ds(work.tile() * work.own, work.own)

  @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS_TO_LOAD, action="decrease")
    plgpu.copy_gmem_to_smem(q.at[b, own, head], q_smem, q_loaded)
    tiles.load_keys(work, k, v, segments, ring)

  @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS, action="increase")
    scores = Scores.of_own(work, segments)
    plgpu.barrier_wait(q_loaded)
    acc, log_sum = _softmax(work, segments, scores, q_smem, ring)
    # Only this warpgroup reads these rows of q, so it may overwrite them.
    [rows] = work.rows_of(q_smem)
    rows[...] = acc.astype(rows.dtype)
    plgpu.commit_smem()
    own = pl.ds(scores.start, ROWS)
    plgpu.copy_smem_to_gmem(rows, out.at[b, own, head])
    lse[b, head, own] = log_sum
    plgpu.wait_smem_to_gmem(0)


def _softmax(
  work: Work, segments: list, scores: Scores, q_smem, ring: Ring
) -> tuple[Array, Array]:
  """Returns a warpgroup's output f32 [64, H] and log-sum-exp [64]."""
  cap, shape = work.kind.soft_cap, (ROWS, work.head_dim)
  # If a soft cap bounds scores, p fits in BF16 without subtracting a maximum.
  # In f16, p could overflow.
  is_bounded = cap is not None and cap <= _NEEDS_NO_MAXIMUM
  has_maximum = not is_bounded or q_smem.dtype == jnp.float16

  def step(j, carry: Any, is_masked: bool):
    number, acc, largest, total = carry
    k_smem, *ids = ring.read(number)
    [rows] = work.rows_of(q_smem)
    x = scores.of(tiles.product(rows, k_smem.T))
    if is_masked:
      x = scores.masked(x, _MASKED, j, ids)
    ring.release(number, work.interpret)
    if has_maximum:
      before = largest
      largest = jnp.maximum(before, jnp.max(x, axis=1) * scores.unit)
      rescaled = jnp.exp2(before - largest)
      acc = acc * tiles.of_rows(rescaled, shape)
      total = total * rescaled
    p = scores.exponential(x, tiles.of_rows(largest, work.shape))
    total = total + jnp.sum(p, axis=1)
    v_smem, *_ = ring.read(number + 1)
    acc = tiles.add_product(acc, p, v_smem, work.interpret)
    ring.release(number + 1, work.interpret)
    return number + 2, acc, largest, total

  least = tiles.zeros(ROWS) + (_LEAST if has_maximum else 0.0)
  carry = jnp.int32(0), tiles.zeros(*shape), least, tiles.zeros(ROWS)
  _, acc, largest, total = work.visits(segments).run(step, carry)
  acc = acc * tiles.of_rows(1 / total, shape)
  return acc, (largest + jnp.log2(total)) * math.log(2.0)
