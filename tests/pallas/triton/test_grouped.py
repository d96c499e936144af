# SPDX-License-Identifier: Apache-2.0
"""Tests kernels of grouped products if groups have several tiles of rows.

`tests/ops` compares them with their definitions at a model's shapes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.pallas.triton import grouped
from tests.comparing import assert_close, jit
from tests.matrices import quick
from tests.pallas.kernels import refused, with_tile

D, F = 48, 80
TILE = grouped.Tile(rows=16, columns=32, step=32, warps=1, stages=1)


def arrays(sizes, dtype):
  rng = np.random.default_rng(0)
  m, e = sum(sizes), len(sizes)
  shapes = (m, D), (m, F), (e, D, F)
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
  "sizes, dtype",
  quick(
    1,
    [
      ((37, 0, 1, 26), jnp.float32),
      ((0, 16, 48, 0), jnp.bfloat16),
      ((64, 0, 0, 0), jnp.float32),
      ((37, 0, 1, 26), jnp.bfloat16),
    ],
  ),
  ids=str,
)
def test_grouped_kernels_match_where_groups_have_several_tiles(
  sizes, dtype, monkeypatch
):
  x, g, w = arrays(sizes, dtype)

  def products(run, x, g, w, sizes):
    return (
      run(ops.grouped_fwd)(x, w, sizes, dtype=jnp.float32),
      run(ops.grouped_dgrad)(g, w, sizes, dtype=jnp.float32),
      run(ops.grouped_wgrad)(x, g, sizes, dtype=jnp.float32),
      run(ops.grouped_wgrad)(x, g, sizes, dtype=jnp.float32, rows_first=True),
    )

  def kernel(op):
    run = with_tile(monkeypatch, op.kernel("triton"), "pick_tile", TILE)
    return functools.partial(run, interpret=True)

  args = x, g, w, jnp.int32(sizes)
  found = jit(functools.partial(products, kernel))(*args)
  wanted = jit(functools.partial(products, lambda op: op.definition))(*args)
  # Products of BF16 are exact in f32; what is left is the order of sums.
  assert_close(found, wanted, 2e-6)


def test_a_dtype_may_be_its_name():
  # As recipe.axes.grad_dtype is, which gradients are summed in on a mesh.
  x, g, _ = arrays((8, 8), jnp.float32)
  for dtype in ("float32", jnp.float32, jnp.dtype("float32")):
    kernel = functools.partial(grouped.grouped_wgrad, dtype=dtype)
    dw = jax.eval_shape(kernel, x, g, jnp.int32((8, 8)))
    assert dw.dtype == jnp.float32


def test_grouped_kernels_say_what_they_cannot_take():
  x, g, w = arrays((8, 8), jnp.float32)
  sizes = jnp.int32((8, 8))
  with refused("grouped_fwd: the last axis must be a multiple of 16"):
    grouped.grouped_fwd(x[:, 1:], w[:, 1:], sizes)
  with refused("grouped_dgrad: the Triton kernel multiplies values of one dty"):
    grouped.grouped_dgrad(g.astype(jnp.bfloat16), w, sizes)
  with refused("grouped_wgrad: .* reads bfloat16 and float32, got .*float16"):
    grouped.grouped_wgrad(x, g, sizes, dtype=jnp.float16)
