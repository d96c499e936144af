# SPDX-License-Identifier: Apache-2.0
"""An operation outside coat_jax, with kernel, definition and cases in one file.

The kernels of coat_jax's own operations are in separate files, so that Pallas
is imported only if needed, and their cases are in `benchmarks`.
"""

import functools
from collections.abc import Iterator

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.cases import OpCase, Sizes, of_op
from coat_jax.ops.dispatch import kernel, op

_TILE = 128


def _why_not(x: Array, **_) -> str | None:
  if x.size % _TILE == 0:
    return None
  return f"the kernel takes multiples of {_TILE} values, got shape {x.shape}"


@kernel(_why_not)
def _double_by_mosaic(x: Array, *, interpret: bool = False) -> Array:
  """Computes `double`, one tile per program."""
  return _launch(x, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _launch(x: Array, interpret: bool) -> Array:
  run = plgpu.kernel(
    _kernel,
    out_type=jax.ShapeDtypeStruct((x.size,), x.dtype),
    grid=(x.size // _TILE,),
    grid_names=("tile",),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
    kernel_name="double",
  )
  return run(x.reshape(-1)).reshape(x.shape)


def _kernel(x_gmem, y_gmem):
  tile = pl.ds(lax.axis_index("tile") * _TILE, _TILE)
  y_gmem[tile] = x_gmem[tile] * 2


@op(mosaic=_double_by_mosaic)
def double(x: Array) -> Array:
  """Computes 2 * x."""
  return x * 2


def cases(sizes: Sizes) -> Iterator[OpCase]:
  """Yields the cases of `double`."""
  rows, columns = sizes.quantized
  yield of_op(
    double,
    dict(rows=rows, columns=columns),
    lambda: (sizes.normal(rows, columns),),
    lambda op, x: op(x),
    num_bytes=2 * sizes.value_bytes * rows * columns,
  )
