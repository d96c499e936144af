# SPDX-License-Identifier: Apache-2.0
"""The gradient of a norm of FP8 values: `ops.norm_bwd`, in Mosaic GPU.

  dx = (g - xhat mean(xhat g) - mean(g)) rstd [+ add],  g = gamma dy
  dgamma = sum(dy xhat), dbeta = sum(dy) over rows  ("rms": no means of x and g)

Each of a few programs per multiprocessor works through every so-manieth row. It
keeps its sums over rows in registers, and loads its next row while it works on
the current one, if the registers suffice. XLA then adds up the programs' sums,
always in the same order.
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
from coat_jax.pallas.mosaic import device, rows
from coat_jax.pallas.mosaic.rows import RowPart

_MAX_WIDTH = 5120  # The registers of longer rows would spill.


@dataclasses.dataclass(frozen=True)
class Share:
  """The number of programs that share the rows; `ahead` loads each next row."""

  programs: int
  ahead: bool


def pick_share(m: int, n: int) -> Share:
  """Picks as many programs as fit on the GPU with their registers."""
  # Wider rows leave no registers to load the next row.
  ahead = n <= 4096
  per_multiprocessor = 3 if n <= 2048 else 2
  return Share(min(m, per_multiprocessor * device.multiprocessors()), ahead)


def _why_not(dy, x, dtype, add, **_) -> str | None:
  return (
    device.why_not()
    or supported.why_not_dtype(dy.dtype, dtype)
    or (None if add is None else supported.why_not_dtype(add.dtype))
    or supported.why_not_values(x)
    or rows.why_not_row(x.qvalue.shape, _MAX_WIDTH)
  )


@kernel(_why_not, by_default=False)
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
  """`ops.norm_bwd`."""
  g = x.group_size
  assert g is not None
  n = dy.shape[-1]
  m = dy.size // n
  share = pick_share(m, n)
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
      rows.in_groups(gamma, g),
    ],
    # A norm without a mean seldom has a beta. Summing its gradient here would
    # cost registers; XLA drops that sum for free if it is unused.
    [
      jax.ShapeDtypeStruct(shape, dtype),
      sums,
      None if stats.mean is None else sums,
    ],
    grid=(programs,),
    interpret=interpret,
    name="norm_bwd",
  )
  dgamma = jnp.sum(dgamma.reshape(programs, n), axis=0)
  if dbeta is None:
    dbeta = dy.reshape(m, n).astype(jnp.float32)
  else:
    dbeta = dbeta.reshape(programs, n)
  return dx.reshape(dy.shape), dgamma, jnp.sum(dbeta, axis=0)


class _Loaded(NamedTuple):
  """The part of a row that a program has loaded, in the dtypes of memory."""

  dy: Array
  codes: Array
  scale: Array
  add: Array | None


def _bwd_kernel(*refs, share: Share):
  *refs, dx_gmem, dgamma_gmem, dbeta_gmem = refs
  *in_parts, mean_gmem, rstd_gmem, gamma_gmem = refs
  m, g, programs = len(rstd_gmem), dx_gmem.shape[1], share.programs
  n = dx_gmem.size // m
  parts = rows.row_parts(n // g, g)
  program = lax.axis_index("last")

  def load(row) -> list[_Loaded]:
    return [
      _Loaded(*(_load(ref, part, row, g) for ref in in_parts)) for part in parts
    ]

  def step(i, carry):
    loaded, sums = carry
    row = program + i * programs
    if share.ahead:
      # The last row is loaded again.
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
        dy * rows.load_groups(gamma_gmem.at[part.of_vector])
        for part, dy in zip(parts, dys, strict=True)
      ]
    both = list(zip(xhats, gradients, strict=True))
    along = rows.sum_of_row(parts, [a * b for a, b in both]) / n
    dxs = [gradient - xhat * along for xhat, gradient in both]
    if mean is not None:
      level = rows.sum_of_row(parts, gradients) / n
      dxs = [dx - level for dx in dxs]
    for part, x, dx in zip(parts, loaded, dxs, strict=True):
      dx = dx * rstd
      if x.add is not None:
        dx = dx + x.add.astype(jnp.float32)
      dx_gmem[part.of_row(row)] = dx.astype(dx_gmem.dtype)
    terms = [[a * b for a, b in zip(dys, xhats, strict=True)], dys]
    sums = [
      [a + b for a, b in zip(total, term, strict=True)]
      for total, term in zip(sums, terms[: len(sums)], strict=True)
    ]
    return following, sums

  outputs = [x for x in (dgamma_gmem, dbeta_gmem) if x is not None]
  zeros = [_zeros(part, g) for part in parts]
  steps = pl.cdiv(m - program, programs)
  carry = load(program) if share.ahead else None, [zeros for _ in outputs]
  _, sums = lax.fori_loop(0, steps, step, carry)
  for ref, totals in zip(outputs, sums, strict=True):
    for part, total in zip(parts, totals, strict=True):
      ref[part.of_row(program)] = total


def _load(ref, part: RowPart, row: Array, size: int) -> Any:
  """Loads a part of a row in the dtype of memory; None stays None."""
  if ref is None:
    return None
  layout = rows.group_layout(size)
  layout = layout if ref.ndim == 2 else layout.reduce(1)
  return plgpu.load(ref.at[part.of_row(row)], layout=layout, optimized=False)


def _zeros(part: RowPart, size: int) -> Array:
  zeros = jnp.zeros((part.count, size), jnp.float32)
  return plgpu.layout_cast(zeros, rows.group_layout(size))
