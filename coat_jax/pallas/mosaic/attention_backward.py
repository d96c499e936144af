# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of attention.

  kernel     a program owns            and visits tiles of
  dq         128 queries of one head   keys
  dk and dv  128 keys of one key head  queries, in all heads that read the key
                                       head

Each of two warpgroups computes 64 rows of dq, or of dk and dv. But with head
sizes above 128, dk and dv do not both fit in a warpgroup's registers. A program
then owns only 64 keys; the first warpgroup computes dv, and the second computes
dk.

No sum uses atomics, so every run returns the same bits.
"""

import functools
from typing import Any, NamedTuple

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


class Inputs(NamedTuple):
  """Arrays that both kernels read."""

  q: Any  # [B, T, N, H]
  k: Any  # [B, T, K, H]
  v: Any  # [B, T, K, H]
  dout: Any  # [B, T, N, H]
  lse: Any  # lse * log2(e), f32 [B, N, padded T]
  delta: Any  # Sum of out * dout over H, f32 [B, N, padded T]


def backward_q(work: Work, inputs: Inputs, segments: tuple) -> Array:
  """Returns dq in q's dtype."""
  q = inputs.q
  _, _, n, h = q.shape
  own = swizzled_rows(work.own, h, dtype=q.dtype)
  return tiles.run(
    work,
    functools.partial(_backward_q, work),
    *inputs,
    *segments,
    heads=n,
    out=jax.ShapeDtypeStruct(q.shape, q.dtype),
    scratch={
      "q_smem": own,
      "dout_smem": own,
      "own_loaded": plgpu.Barrier(num_arrivals=2),
      "ring": tiles.ring(work, q.dtype),
    },
    name="attention_dq",
  )


def _backward_q(
  work: Work, *refs, q_smem, dout_smem, own_loaded, ring: Ring
) -> None:
  *inputs, dq = refs
  inputs, segments = Inputs(*inputs[:6]), inputs[6:]
  b, head = lax.axis_index("batch"), lax.axis_index("head")

  @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS_TO_LOAD, action="decrease")
    own = pl.ds(work.tile() * work.own, work.own)
    for x, smem in ((inputs.q, q_smem), (inputs.dout, dout_smem)):
      plgpu.copy_gmem_to_smem(x.at[b, own, head], smem, own_loaded)
    tiles.load_keys(work, inputs.k, inputs.v, segments, ring)

  @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS, action="increase")
    scores = Scores.of_own(work, segments)
    own = pl.ds(scores.start, ROWS)
    lse, delta = (
      plgpu.load(x.at[b, head, own], layout=tiles.OF_ROWS, optimized=False)
      for x in (inputs.lse, inputs.delta)
    )
    add_product = functools.partial(tiles.add_product, interpret=work.interpret)

    def step(j, carry, is_masked: bool):
      number, sums = carry
      q_rows, dout_rows = work.rows_of(q_smem, dout_smem)
      k_smem, *ids = ring.read(number)
      x = scores.of(tiles.product(q_rows, k_smem.T))
      p = scores.exponential(x, tiles.of_rows(lse, work.shape))
      if is_masked:  # For masked keys, p may be infinite.
        p = scores.masked(p, 0.0, j, ids)
      p = scores.slope(x, p)
      v_smem, *_ = ring.read(number + 1)
      # After the next matmul, ds is dp - delta.
      ds = tiles.of_rows(-delta, work.shape)
      ds = add_product(ds, dout_rows, v_smem.T)
      ring.release(number + 1, work.interpret)
      sums = add_product(sums, p * ds, k_smem)
      ring.release(number, work.interpret)
      return number + 2, sums

    plgpu.barrier_wait(own_loaded)
    carry = jnp.int32(0), tiles.zeros(ROWS, work.head_dim)
    _, sums = work.visits(segments).run(step, carry)
    # Only this warpgroup reads these rows of q, so it may overwrite them.
    [q_rows] = work.rows_of(q_smem)
    q_rows[...] = (sums * work.scale).astype(q_rows.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_rows, dq.at[b, own, head])
    plgpu.wait_smem_to_gmem(0)


def backward_kv(
  work: Work, inputs: Inputs, segments: tuple
) -> tuple[Array, Array]:
  """Returns dk and dv in the dtypes of k and v."""
  k, v = inputs.k, inputs.v
  _, _, kv_heads, h = k.shape
  own = swizzled_rows(work.own, h, dtype=k.dtype)
  of_rows = plgpu.SMEM((work.stages, work.step), jnp.float32)
  return tiles.run(
    work,
    functools.partial(_backward_kv, work),
    *inputs,
    *segments,
    heads=kv_heads,
    out=(
      jax.ShapeDtypeStruct(k.shape, k.dtype),
      jax.ShapeDtypeStruct(v.shape, v.dtype),
    ),
    scratch={
      "k_smem": own,
      "v_smem": own,
      "own_loaded": plgpu.Barrier(num_arrivals=2),
      "ring": tiles.ring(work, k.dtype, of_rows),
      "finished": plgpu.Barrier(num_arrivals=WARPGROUPS),
    },
    name="attention_dkv",
  )


def _backward_kv(
  work: Work, *refs, k_smem, v_smem, own_loaded, ring: Ring, finished
) -> None:
  *inputs, dk, dv = refs
  inputs, segments = Inputs(*inputs[:6]), inputs[6:]
  b, kv_head = lax.axis_index("batch"), lax.axis_index("head")

  @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS_TO_LOAD, action="decrease")
    own = pl.ds(work.tile() * work.own, work.own)
    for x, smem in ((inputs.k, k_smem), (inputs.v, v_smem)):
      plgpu.copy_gmem_to_smem(x.at[b, own, kv_head], smem, own_loaded)

    def load_head(i, number):
      visits = work.visits(segments)
      head = kv_head * work.heads + i

      def load(j, number):
        queries = pl.ds(j * work.step, work.step)
        ids = [x.at[b, queries] for x in segments[:1]]
        q, lse = inputs.q.at[b, queries, head], inputs.lse.at[b, head, queries]
        ring.load(number, q, lse, *ids)
        dout = inputs.dout.at[b, queries, head]
        ring.load(number + 1, dout, inputs.delta.at[b, head, queries], *ids)
        return number + 2

      return lax.fori_loop(visits.first, visits.behind, load, number)

    ring.drain(lax.fori_loop(0, work.heads, load_head, jnp.int32(0)))

  def compute(has_dk: bool, has_dv: bool):
    scores = Scores.of_own(work, segments)
    dk_sums, dv_sums = _sum_queries(
      work, segments, scores, (k_smem, v_smem), ring, has_dk, has_dv
    )
    # The other warpgroup may still read the same rows, so wait for it before
    # overwriting them.
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
    k_rows, v_rows = work.rows_of(k_smem, v_smem)
    own = pl.ds(scores.start, ROWS)
    if dk_sums is not None:
      k_rows[...] = (dk_sums * work.scale).astype(k_rows.dtype)
    if dv_sums is not None:
      v_rows[...] = dv_sums.astype(v_rows.dtype)
    plgpu.commit_smem()
    if dk_sums is not None:
      plgpu.copy_smem_to_gmem(k_rows, dk.at[b, own, kv_head])
    if dv_sums is not None:
      plgpu.copy_smem_to_gmem(v_rows, dv.at[b, own, kv_head])
    plgpu.wait_smem_to_gmem(0)

  @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
  def _():
    plgpu.set_max_registers(tiles.REGISTERS, action="increase")
    plgpu.barrier_wait(own_loaded)
    if work.own == ROWS:
      first = lax.axis_index("warpgroup") == 0
      pl.when(first)(lambda: compute(has_dk=False, has_dv=True))
      pl.when(~first)(lambda: compute(has_dk=True, has_dv=False))
    else:
      compute(has_dk=True, has_dv=True)


def _sum_queries(
  work: Work,
  segments: list,
  scores: Scores,
  own_smem: tuple[Any, Any],
  ring: Ring,
  has_dk: bool,
  has_dv: bool,
) -> tuple[Array | None, Array | None]:
  """Returns this warpgroup's dk / scale and dv, each f32 [64, H] or None."""
  add_product = functools.partial(tiles.add_product, interpret=work.interpret)

  def step(j, carry, is_masked: bool):
    number, dk, dv = carry
    k_rows, v_rows = work.rows_of(*own_smem)
    q_smem, lse_smem, *ids = ring.read(number)
    x = scores.of(tiles.product(k_rows, q_smem.T))
    p = scores.exponential(x, tiles.load_columns(lse_smem, work.shape))
    if is_masked:  # For masked keys, p may be infinite.
      p = scores.masked(p, 0.0, j, ids)
    dout_smem, delta_smem, *_ = ring.read(number + 1)
    if has_dv:
      dv = add_product(dv, p, dout_smem)
    if has_dk:
      p = scores.slope(x, p)
      # After the next matmul, ds is dp - delta.
      ds = -tiles.load_columns(delta_smem, work.shape)
      ds = add_product(ds, v_rows, dout_smem.T)
      dk = add_product(dk, p * ds, q_smem)
    ring.release(number, work.interpret)
    ring.release(number + 1, work.interpret)
    return number + 2, dk, dv

  zeros = tiles.zeros(ROWS, work.head_dim)
  carry = zeros if has_dk else None, zeros if has_dv else None
  _, dk, dv = lax.fori_loop(
    0,
    work.heads,
    lambda _, carry: work.visits(segments).run(step, carry),
    (jnp.int32(0), *carry),
  )
  return dk, dv
