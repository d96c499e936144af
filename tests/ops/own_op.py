# SPDX-License-Identifier: Apache-2.0
"""An operation defined outside coat_jax: kernel, definition, cases, one file.

Operations of `coat_jax` have their kernels in another file, so that Pallas is
loaded only if it is needed, and their cases in `benchmarks`.
"""

import functools
from collections.abc import Iterator

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from benchmarks.cases import OpCase, Sizes, of_op
from coat_jax.ops.dispatch import kernel, op

_TILE = 128


def _why_not(x: Array, **_) -> str | None:
  if x.size % _TILE == 0:
    return None
  return (
    f"the Triton kernel takes multiples of {_TILE} values, got shape {x.shape}"
  )


@kernel(_why_not)
def _double_by_triton(x: Array, *, interpret: bool = False) -> Array:
  """`double`; each program computes one tile."""
  return _launch(x, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _launch(x: Array, interpret: bool) -> Array:
  tile = pl.BlockSpec((_TILE,), lambda i: (i,))
  return pl.pallas_call(
    _kernel,
    grid=(x.size // _TILE,),
    in_specs=[tile],
    out_specs=tile,
    out_shape=jax.ShapeDtypeStruct((x.size,), x.dtype),
    # JAX 0.11.0 would lower it to Mosaic GPU.
    compiler_params=plt.CompilerParams(),
    interpret=interpret,
    name="double",
  )(x.reshape(-1)).reshape(x.shape)


def _kernel(x_ref, y_ref):
  y_ref[...] = x_ref[...] * 2


@op(triton=_double_by_triton)
def double(x: Array) -> Array:
  """Computes 2 x."""
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
