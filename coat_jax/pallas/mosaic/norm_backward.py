# SPDX-License-Identifier: Apache-2.0
"""Backward pass of norms in FP8, in Mosaic GPU: `ops.norm_bwd`.

  dx = (g - xhat mean(xhat g) - mean(g)) rstd [+ add],  g = gamma dy
  dgamma = sum(dy xhat), dbeta = sum(dy), summed over rows

For "rms", neither the mean of x nor mean(g) is subtracted.

Each of P programs processes every P-th row. It keeps its sums for dgamma and
dbeta in registers, or in shared memory if rows are wide. If enough registers
are left, the program loads its next row while it processes the current one. XLA
then adds up the sums of all programs, always in the same order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import NormStats
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import device, rows, whole_rows
from coat_jax.pallas.mosaic.whole_rows import RowPart


@dataclasses.dataclass(frozen=True)
class Share:
  """The number of programs, and what each program keeps in registers."""

  programs: int
  ahead: bool  # Whether a program loads a row while it processes another one.
  sums: bool  # Whether sums over rows are in registers, not in shared memory.


# Maps the largest width of rows to the number of programs that then fit on a
# multiprocessor; for wider rows, 2 fit. With a mean, sums take more registers.
_PROGRAMS = {768: 7, 1024: 5, 1536: 4, 2048: 3}
_PROGRAMS_WITH_MEAN = _PROGRAMS | {768: 5}


def pick_share(m: int, n: int, has_mean: bool) -> Share:
  """Picks as many programs as the GPU has registers for, but at most m."""
  fits = _PROGRAMS_WITH_MEAN if has_mean else _PROGRAMS
  count = next((count for width, count in fits.items() if n <= width), 2)
  programs = min(m, count * device.multiprocessors())
  # For wider rows, registers would spill.
  return Share(programs, ahead=n <= 4096, sums=n <= 5120)


def _why_not(dy, x, dtype, add, **_) -> str | None:
  return (
    device.why_not_conversions()
    or supported.why_not_dtype(dy.dtype, dtype)
    or (None if add is None else supported.why_not_dtype(add.dtype))
    or supported.why_not_values(x)
    or whole_rows.why_not_row(x.qvalue.shape, x.group_size)
  )


@kernel(_why_not)
@jax.jit(static_argnames=("dtype", "interpret"))
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
  """Computes `ops.norm_bwd`."""
  g = x.group_size
  assert g is not None
  n = dy.shape[-1]
  m = dy.size // n
  share = pick_share(m, n, stats.mean is not None)
  programs = share.programs
  shape = m * n // g, g
  sums = jax.ShapeDtypeStruct((programs * n // g, g), jnp.float32)
  dx, dgamma, dbeta = rows.run(
    functools.partial(_bwd_kernel, share=share),
    [
      dy.reshape(shape),
      x.qvalue.reshape(shape),
      x.scale.reshape(shape[:1]),
      None if add is None else add.reshape(shape),
      None if stats.mean is None else stats.mean.reshape(m),
      stats.rstd.reshape(m),
      whole_rows.in_groups(gamma, g),
    ],
    # A norm without a mean seldom has a beta, and the sum for dbeta would take
    # registers. So XLA computes dbeta below, if anything uses it.
    [
      jax.ShapeDtypeStruct(shape, dtype),
      sums,
      None if stats.mean is None else sums,
    ],
    grid=(programs,),
    scratch_types=[]
    if share.sums
    else _sums(n, g, 1 + (stats.mean is not None)),
    interpret=interpret,
    kernel_name="norm_bwd",
  )
  dgamma = jnp.sum(dgamma.reshape(programs, n), axis=0)
  if dbeta is None:
    dbeta = dy.reshape(m, n).astype(jnp.float32)
  else:
    dbeta = dbeta.reshape(programs, n)
  return dx.reshape(dy.shape), dgamma, jnp.sum(dbeta, axis=0)


def _sums(n: int, size: int, count: int) -> list:
  """Returns the types of the scratch arrays for `count` sums over rows."""
  shapes = [(part.count, size) for part in whole_rows.row_parts(n, size)]
  return count * [plgpu.SMEM(shape, jnp.float32) for shape in shapes]


class _Loaded(NamedTuple):
  """A part of a row, in the dtypes of the arrays in memory."""

  dy: Array
  codes: Array
  scale: Array
  add: Array | None


def _bwd_kernel(*refs, share: Share):
  in_parts, refs = refs[:4], refs[4:]
  mean_gmem, rstd_gmem, gamma_gmem, dx_gmem, *refs = refs
  outputs, sums_smem = refs[:2], refs[2:]
  outputs = [ref for ref in outputs if ref is not None]
  m, g, programs = rstd_gmem.shape[0], dx_gmem.shape[1], share.programs
  n = dx_gmem.size // m
  parts = whole_rows.row_parts(n, g)
  program = lax.axis_index("last")

  def load(row) -> list[_Loaded]:
    return [
      _Loaded(*(_load(ref, part, row) for ref in in_parts)) for part in parts
    ]

  def step(i, carry):
    loaded, sums = carry
    row = program + i * programs
    if share.ahead:
      # After its last row, a program loads row m - 1 without using it.
      following = load(jnp.minimum(row + programs, m - 1))
    else:
      loaded, following = load(row), None
    rstd = rstd_gmem[row]
    mean = None if mean_gmem is None else mean_gmem[row]
    dys = [x.dy.astype(jnp.float32) for x in loaded]
    xhats, gradients = [], dys
    for x in loaded:
      value = rows.dequantize_groups(x.codes, x.scale.astype(jnp.float32))
      if mean is not None:
        value = value - mean
      xhats.append(value * rstd)
    if gamma_gmem is not None:
      gradients = [
        dy * rows.load_groups(gamma_gmem.at[part.of_vector], part.load)
        for part, dy in zip(parts, dys, strict=True)
      ]
    both = list(zip(xhats, gradients, strict=True))
    along = whole_rows.sum_of_row(parts, [a * b for a, b in both]) / n
    dxs = [gradient - xhat * along for xhat, gradient in both]
    if mean is not None:
      level = whole_rows.sum_of_row(parts, gradients) / n
      dxs = [dx - level for dx in dxs]
    for part, x, dx in zip(parts, loaded, dxs, strict=True):
      dx = dx * rstd
      if x.add is not None:
        dx = dx + x.add.astype(jnp.float32)
      place = dx_gmem.at[part.of_row(row)]
      rows.store(place, dx.astype(dx_gmem.dtype))
    terms = [a * b for a, b in zip(dys, xhats, strict=True)]
    if mean is not None:
      terms += dys
    return following, add(sums, terms)

  sum_parts = len(outputs) * parts  # Each output has a sum per part of a row.

  def add(sums, terms):
    if share.sums:
      return [a + b for a, b in zip(sums, terms, strict=True)]
    # Each thread reads and writes only its own values, so no barrier is needed.
    for ref, part, term in zip(sums_smem, sum_parts, terms, strict=True):
      rows.store(ref, _load_sum(ref, part) + term)
    return sums

  sums = [_zeros(part) for part in sum_parts]
  if not share.sums:
    for ref, zeros in zip(sums_smem, sums, strict=True):
      rows.store(ref, zeros)
    sums = []
  steps = pl.cdiv(m - program, jnp.int32(programs))
  carry = load(program) if share.ahead else None, sums
  _, sums = lax.fori_loop(0, steps, step, carry)
  if not share.sums:
    sums = map(_load_sum, sums_smem, sum_parts)
  for i, (part, total) in enumerate(zip(sum_parts, sums, strict=True)):
    rows.store(outputs[i // len(parts)].at[part.of_row(program)], total)


def _load(ref, part: RowPart, row: Array) -> Any:
  """Loads a part of a row without converting it; None stays None."""
  if ref is None:
    return None
  layout = part.load.layout
  layout = layout if ref.ndim == 2 else layout.reduce(1)
  return plgpu.load(ref.at[part.of_row(row)], layout=layout, optimized=False)


def _load_sum(ref, part: RowPart) -> Array:
  return plgpu.load(ref, layout=part.load.layout, optimized=False)


def _zeros(part: RowPart) -> Array:
  zeros = jnp.zeros((part.count, part.load.size), jnp.float32)
  return plgpu.layout_cast(zeros, part.load.layout)
