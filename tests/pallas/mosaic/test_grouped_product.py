# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's grouped matmuls with NumPy, interpreted and on a GPU.

Codes are small integers and scales are powers of two. Then all sums are exact
in f32, even on tensor cores, so results must match NumPy's bit for bit.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops import Operand
from coat_jax.pallas.mosaic import grouped_product as kernel
from coat_jax.pallas.mosaic import grouped_table
from coat_jax.pallas.mosaic.grouped_kernel import Tile
from coat_jax.pallas.mosaic.grouped_product import TILES
from tests.comparing import jit
from tests.matrices import quick
from tests.pallas.kernels import for_h200, lowered_for_h200, refused

# Sizes of groups, and the number of rows. Groups begin and end at any row. Some
# are empty or have one row, and some rows belong to no group.
SIZES = {
  # Several groups share a block of 128 rows.
  "many": ((100, 28, 0, 1, 113, 14, 0, 0, 40, 3), 384),
  "uneven": ((137, 0, 1, 113, 5), 256),
  "left_over": ((130, 3, 0, 200), 384),
  "one": ((0, 256, 0), 256),
  "none": ((0, 0), 256),
  "few": ((100, 36), 136),  # Fewer rows than the larger tile has.
}


def arrays(name, d, f, seed=0):
  """Makes x and weights in E4M3, g in E5M2, and sizes; all sums are exact."""
  sizes, m = SIZES[name]
  rng = np.random.default_rng(seed)

  def codes(dtype, *shape):
    return jnp.asarray(rng.integers(-3, 4, size=shape), jnp.float32).astype(
      dtype
    )

  x, g, w = (
    codes(E4M3, m, d),
    codes(E5M2, m, f),
    codes(E4M3, len(sizes), d, f),
  )
  x_scale, g_scale = jnp.float32(0.5), jnp.float32(4)
  w_scale = jnp.exp2(jnp.arange(len(sizes), dtype=jnp.float32) - 2)
  is_used = jnp.arange(m)[:, None] < sum(sizes)
  g = jnp.where(is_used, g, jnp.zeros_like(g))
  return (
    Operand(x, x.T, x_scale),
    Operand(g, g.T, g_scale),
    Operand(w, jnp.swapaxes(w, 1, 2), w_scale),
    jnp.int32(sizes),
  )


def by_hand(x, g, w, sizes):
  """Computes the three matmuls in float64, one group at a time."""
  x, g = (np.float64(a.rows) * np.float64(a.scale) for a in (x, g))
  w = np.float64(w.rows) * np.float64(w.scale)[:, None, None]
  y, dx = np.zeros((len(x), w.shape[2])), np.zeros((len(x), w.shape[1]))
  dw, start = np.zeros(w.shape), 0
  for e, size in enumerate(sizes.tolist()):
    rows = slice(start, start + size)
    y[rows], dx[rows] = x[rows] @ w[e], g[rows] @ w[e].T
    dw[e] = x[rows].T @ g[rows]
    start += size
  return y, dx, dw


def assert_is(found, wanted):
  wanted = np.asarray(wanted, np.float32).astype(found.dtype)
  np.testing.assert_array_equal(np.asarray(found), wanted)


SMALL = {
  "three": Tile(warpgroups=3, stages=2, slots=1),
  "two": Tile(warpgroups=2, stages=2, band=2),
}


def interpreted(tile):
  return kernel.How(SMALL.get(tile), programs=3, interpret=True)


@pytest.mark.parametrize(
  "name, tile",
  quick(2, [("few", None), *itertools.product([*SIZES][:-1], SMALL)]),
)
def test_interpreted_kernel_multiplies_rows_by_weights(name, tile):
  x, g, w, sizes = arrays(name, d=256, f=128)
  wanted = by_hand(x, g, w, sizes)
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  y = kernel.rows_product(
    x.rows,
    w.columns,
    sizes,
    jnp.bfloat16,
    how=interpreted(tile),
    scale=x.scale * w.scale,
  )
  assert_is(y, wanted[0])
  assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("run", quick(1, [8, 3, 1]))
@pytest.mark.parametrize("name", quick(2, SIZES))
def test_interpreted_kernel_computes_weight_gradients(name, run, monkeypatch):
  # A single program computes runs of as many groups as are allowed.
  monkeypatch.setattr(kernel, "_MOST_GROUPS", run)
  monkeypatch.setattr(kernel, "_FEWEST_TILES", 1)
  x, g, w, sizes = arrays(name, d=256, f=128)
  wanted = by_hand(x, g, w, sizes)
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  dw = kernel.weights_product(
    x.columns,
    g.columns,
    sizes,
    jnp.float32,
    how=kernel.How(SMALL["two"], programs=1, interpret=True),
    scale=jnp.broadcast_to(x.scale * g.scale, sizes.shape),
  )
  assert_is(dw, wanted[2])
  assert not interpret_pallas_call.get_races().races_found


def in_16_bits(operands, dtype):
  """Dequantizes operands to a 16-bit dtype."""
  x, g, w = (a.rows.astype(jnp.float32) for a in operands)
  x_scale, g_scale, w_scale = (a.scale for a in operands)
  w = w * w_scale[:, None, None]
  return [a.astype(dtype) for a in (x * x_scale, g * g_scale, w)]


@pytest.mark.parametrize(
  "name, tile, dtype",
  quick(
    1,
    [
      ("uneven", "three", jnp.bfloat16),
      ("left_over", "three", jnp.float16),
      ("one", "two", jnp.bfloat16),
      ("none", "two", jnp.bfloat16),
    ],
  ),
)
def test_interpreted_kernel_multiplies_16_bit_operands(name, tile, dtype):
  *operands, sizes = arrays(name, d=256, f=128)
  y, dx, dw = by_hand(*operands, sizes)
  x, g, w = in_16_bits(operands, dtype)
  rows, weights = kernel.rows_product, kernel.weights_product
  how = interpreted(tile)
  for run, wanted in (
    (lambda: rows(x, w, sizes, dtype, how, k_first=True), y),
    (lambda: rows(g, w, sizes, dtype, how), dx),
    (lambda: weights(x, g, sizes, jnp.float32, how=interpreted("two")), dw),
  ):
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    assert_is(run(), wanted)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize(
  "name", quick(0, ["fwd", "dgrad", "wgrad", "rows_first"])
)
def test_operands_of_any_width_are_padded(name):
  *operands, sizes = arrays("uneven", d=72, f=40)
  y, dx, dw = by_hand(*operands, sizes)
  x, g, w = in_16_bits(operands, jnp.bfloat16)
  how = dict(interpret=True)
  if name == "fwd":
    assert_is(kernel.grouped_fwd(x, w, sizes, **how), y)
  elif name == "dgrad":
    assert_is(kernel.grouped_dgrad(g, w, sizes, **how), dx)
  elif name == "wgrad":
    # Add 9 rows, so that their number is not a multiple of a block either.
    x, g = (jnp.concatenate([a, a[:9] * 0]) for a in (x, g))
    assert_is(kernel.grouped_wgrad(x, g, sizes, **how), dw)
  else:
    how |= dict(rows_first=True)
    found = kernel.grouped_wgrad(x, g, sizes, **how)
    assert_is(found, np.moveaxis(dw, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows_first", "wgrad", "fwd", "dgrad"])
def test_interpreted_operation_matches_numpy(name):
  x, g, w, sizes = arrays("uneven", d=128, f=256)
  y, dx, dw = by_hand(x, g, w, sizes)
  how = dict(interpret=True)
  if name == "fwd":
    assert_is(kernel.grouped_linear_fwd(x, w, sizes, **how), y)
  elif name == "dgrad":
    assert_is(kernel.grouped_linear_dgrad(g, w, sizes, **how), dx)
  else:
    how |= dict(rows_first=name == "rows_first")
    found = kernel.grouped_linear_wgrad(x, g, sizes, **how)
    assert_is(found, np.moveaxis(dw, 0, 1) if how["rows_first"] else dw)


@pytest.mark.parametrize("sizes", [(5, 0, 300, 129, 1), (0, 0), (511,), (8, 8)])
@pytest.mark.parametrize("tile_m", [128, 192])
def test_tiles_cover_each_row_once(sizes, tile_m):
  m = 512
  table, used = grouped_table.tiles_of_rows(
    jnp.int32(sizes), m=m, tile_m=tile_m, blocks=3
  )
  assert used[0] <= table.shape[1]
  group, row, begin, end, _, blocks = np.asarray(table)[:, : int(used[0])]
  # Rows after the last group are also in tiles of the table, with 0 blocks.
  of_row = np.repeat(np.arange(len(sizes) + 1), (*sizes, m - sum(sizes)))
  found = np.full(m, -1)
  for tile in range(int(used[0])):
    assert row[tile] % 8 == 0 and 0 <= row[tile] <= m - tile_m
    assert row[tile] <= begin[tile] < end[tile] <= row[tile] + tile_m
    own = slice(begin[tile], end[tile])
    assert np.all(found[own] == -1)
    found[own] = group[tile] if blocks[tile] else len(sizes)
    assert blocks[tile] in (0, 3)
  np.testing.assert_array_equal(found, of_row)


def specs(m=512, d=256, f=384, e=5):
  return jax.eval_shape(
    lambda: (
      Operand(jnp.zeros((m, d), E4M3), jnp.zeros((d, m), E4M3), jnp.zeros(())),
      Operand(jnp.zeros((m, f), E5M2), jnp.zeros((f, m), E5M2), jnp.zeros(())),
      Operand(
        jnp.zeros((e, d, f), E4M3), jnp.zeros((e, f, d), E4M3), jnp.zeros(e)
      ),
      jnp.zeros(e, jnp.int32),
    )
  )


@pytest.mark.parametrize("name", ["fwd", "dgrad", "wgrad"])
def test_kernel_lowers_for_a_gpu(name):
  x, g, w, sizes = specs()
  operands = {"fwd": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[name]
  run = getattr(kernel, f"grouped_linear_{name}")
  assert lowered_for_h200(run, *operands, sizes).count("mosaic_gpu_v2") == 1


def specs_of_16_bits(dtype=jnp.bfloat16, **sizes):
  x, g, w, sizes = specs(**sizes)
  of = lambda a: jax.ShapeDtypeStruct(a.rows.shape, dtype)  # noqa: E731
  return of(x), of(g), of(w), sizes


@pytest.mark.parametrize("name", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernel_for_16_bit_operands_lowers_for_a_gpu(dtype, name):
  x, g, w, sizes = specs_of_16_bits(dtype)
  operands = {"fwd": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[name]
  run = getattr(kernel, f"grouped_{name}")
  assert lowered_for_h200(run, *operands, sizes).count("mosaic_gpu_v2") == 1


def test_explain_names_the_kernels():
  x, _, w, sizes = specs()
  x_16, _, w_16, _ = specs_of_16_bits()
  with for_h200():
    for said in (
      ops.explain(ops.grouped_linear_fwd, x, w, sizes),
      ops.explain(ops.grouped_fwd, x_16, w_16, sizes),
    ):
      assert "mosaic on a GPU" in said


def test_dtype_may_be_given_by_name():
  # `recipe.axes.grad_dtype`, in which a mesh sums gradients, is a string.
  x, g, _, sizes = specs_of_16_bits()
  for dtype in ("float32", jnp.float32, jnp.dtype("float32")):
    run = functools.partial(kernel.grouped_wgrad, dtype=dtype)
    assert jax.eval_shape(run, x, g, sizes).dtype == jnp.float32


def test_kernel_refuses_unsupported_arguments(monkeypatch):
  def trace(op, *args, **how):
    jax.eval_shape(lambda *args: op(*args, **how), *args)

  fwd, wgrad = kernel.grouped_linear_fwd, kernel.grouped_linear_wgrad
  x, g, w, sizes = specs()
  with refused("writes bfloat16 or float16, got float32"):
    trace(fwd, x, w, sizes, dtype=jnp.float32)
  few = specs(m=64)
  with refused("at least 128 rows, got 64"):
    trace(fwd, few[0], few[2], sizes)
  x_16, g_16, w_16, _ = specs_of_16_bits(m=96)
  with refused("at least 128 rows, got 96"):
    trace(kernel.grouped_dgrad, g_16, w_16, sizes)
  x_16, _, w_16, _ = specs_of_16_bits(jnp.float32)
  with refused("two BF16 or two f16 arrays, got float32 and float32"):
    trace(kernel.grouped_fwd, x_16, w_16, sizes)
  odd = specs(m=192)
  with refused(r"multiples of \(128, 128, 128, 128\), got \(256, 192, 384, 19"):
    trace(wgrad, odd[0], odd[1], sizes)
  monkeypatch.setattr(kernel.device, "capability", lambda: 10.0)
  with refused(r"capability 9.0 \(Hopper\), got 10.0"):
    trace(fwd, x, w, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_kernel_matches_numpy_on_a_gpu(tile):
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(8000, rng.dirichlet(np.full(32, 0.5)))
  SIZES["routed"] = tuple(int(n) for n in sizes), 8192
  x, g, w, sizes = arrays("routed", d=1024, f=768)
  y, dx, dw = by_hand(x, g, w, sizes)
  how = kernel.How(TILES[tile])

  @jit
  def products(x, g, w, sizes):
    x_w, g_w, x_g = (
      x.scale * w.scale,
      g.scale * w.scale,
      jnp.broadcast_to(x.scale * g.scale, sizes.shape),
    )
    rows, weights = kernel.rows_product, kernel.weights_product
    return (
      rows(x.rows, w.columns, sizes, jnp.bfloat16, how, scale=x_w),
      rows(g.rows, w.rows, sizes, jnp.bfloat16, how, scale=g_w),
      weights(x.columns, g.columns, sizes, jnp.float32, scale=x_g),
      weights(x.columns, g.columns, sizes, jnp.bfloat16, True, scale=x_g),
    )

  first = products(x, g, w, sizes)
  rows_first = np.moveaxis(dw, 0, 1)
  for found, wanted in zip(first, (y, dx, dw, rows_first), strict=True):
    assert_is(found, wanted)
  for _ in range(20):  # A race would cause an error only now and then.
    again = products(x, g, w, sizes)
    jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernel_for_16_bit_operands_matches_numpy_on_a_gpu(dtype, tile):
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(8192, rng.dirichlet(np.full(32, 0.5)))
  x, g, w = (
    rng.integers(-3, 4, size=shape).astype(np.float32)
    for shape in ((8192, 1024), (8192, 768), (32, 1024, 768))
  )
  groups = np.split(np.arange(8192), np.cumsum(sizes)[:-1])
  wanted = (
    np.concatenate([x[rows] @ w[e] for e, rows in enumerate(groups)]),
    np.concatenate([g[rows] @ w[e].T for e, rows in enumerate(groups)]),
    np.stack([x[rows].T @ g[rows] for rows in groups]),
  )
  how = kernel.How(TILES[tile])

  @jit
  def products(x, g, w, sizes):
    rows, weights = kernel.rows_product, kernel.weights_product
    return (
      rows(x, w, sizes, dtype, how, k_first=True),
      rows(g, w, sizes, dtype, how),
      weights(x, g, sizes, jnp.float32),
    )

  args = *(jnp.asarray(a, dtype) for a in (x, g, w)), jnp.int32(sizes)
  first = products(*args)
  for found, each in zip(first, wanted, strict=True):
    assert_is(found, each)
  for _ in range(20):  # A race would cause an error only now and then.
    again = products(*args)
    jax.tree.map(np.testing.assert_array_equal, again, first)
