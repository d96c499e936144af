# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's block-scaled matmul with NumPy, interpreted and on a GPU.

`exact_operands` makes codes that are small integers, and scales that are powers
of two near 1. All sums are then exact in f32, even on tensor cores, so results
must match NumPy's bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import BLOCK, Blocks
from coat_jax.ops.dispatch import Op
from coat_jax.pallas.mosaic import block_product as kernel
from coat_jax.pallas.mosaic.block_kernel import Tile
from coat_jax.pallas.mosaic.block_product import TILES
from tests.comparing import assert_close
from tests.matrices import quick
from tests.pallas.kernels import for_h200, lowered_for_h200, refused

DTYPES = {"fwd": jnp.bfloat16, "wgrad": jnp.float32}


def exact_operands(form, m, n, k, b_dtype=E4M3, seed=0):
  """Makes operands whose matmul is exact.

  b has one scale per row for `wgrad`, and otherwise one per 128 rows.
  """
  rng = np.random.default_rng(seed)

  def operand(rows, scale_rows, dtype):
    codes = rng.integers(-4, 5, size=(rows, k)).astype(np.float32)
    scale = np.exp2(rng.integers(-2, 3, size=(scale_rows, k // BLOCK)))
    return QTensor(
      jnp.asarray(codes).astype(dtype), jnp.asarray(scale, jnp.float32), BLOCK
    )

  b_scales = n if form == "wgrad" else n // BLOCK
  return operand(m, m, E4M3), operand(n, b_scales, b_dtype)


def values(x: QTensor) -> np.ndarray:
  """Dequantizes to float64."""
  rows, k = x.qvalue.shape
  scale = np.repeat(np.asarray(x.scale, np.float64), rows // len(x.scale), 0)
  return np.asarray(x.qvalue, np.float64) * np.repeat(scale, BLOCK, 1)


def assert_is_product(out, a, b, add=None):
  expected = values(a) @ values(b).T
  if add is not None:
    expected += np.asarray(add, np.float64)
  # The sum is exact in f32, so only the result is rounded, and only once.
  expected = expected.astype(np.float32).astype(out.dtype)
  np.testing.assert_array_equal(np.asarray(out), expected)


SMALL = {
  "paired": (TILES["paired"], 2),
  "low": (TILES["low"], 3),
  "tall": (TILES["tall"], 1),
  "shallow": (Tile(stages=2, slots=1), 3),
  "low_paired": (Tile(waves=1, stages=3, slots=3, cluster=2, band=3), 4),
}
CASES = [
  pytest.param(form, *case, id=f"{form}-{name}")
  for name, case in SMALL.items()
  for form in DTYPES
]


# There are fewer programs than tiles and more blocks than stages, so that
# programs compute several tiles and reuse all stages.
@pytest.mark.parametrize("form, tile, programs", quick(3, CASES))
def test_interpreted_kernel_matches_numpy(form, tile, programs):
  a, b = exact_operands(form, m=512, n=256, k=4 * BLOCK)
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  out = kernel.product(
    a, b, DTYPES[form], tile=tile, programs=programs, interpret=True
  )
  assert_is_product(out, a, b)
  assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_interpreted_kernel_adds_before_it_rounds(dtype):
  a, b = exact_operands("fwd", m=128, n=128, k=BLOCK)
  add = jax.random.randint(jax.random.key(0), (128, 128), -99, 99) / 4
  add = add.astype(dtype)
  out = kernel.product(a, b, jnp.bfloat16, add, interpret=True)
  assert_is_product(out, a, b, add)


def test_interpreted_operation_adds_a_bias_in_f32():
  x, w = operands_of_op("fwd")()
  bias = jax.random.normal(jax.random.key(3), (384,))
  options = dict(dtype=jnp.bfloat16, bias=bias)
  out = kernel.linear_fwd(x, w, **options, interpret=True)
  assert_close(out, ops.linear_fwd.definition(x, w, **options), 2**-8)


def operands_of_op(name, dtype=E4M3, m=256, d=128, f=384):
  """Returns a function that makes block-scaled operands for `ops.linear_*`."""

  @jax.jit
  def operands():
    x, g, w = (
      jax.random.normal(jax.random.key(i), shape)
      for i, shape in enumerate(((2, m // 2, d), (2, m // 2, f), (d, f)))
    )
    w = Blocks().of_weights.quantize(w, layout="both")
    x = Blocks().quantize(x, layout="both")
    g = Blocks(dtype).quantize(g, layout="both")
    return {"fwd": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[name]

  return operands


@pytest.mark.parametrize(
  "name, dtype", quick(1, [("fwd", E4M3), ("dgrad", E5M2), ("wgrad", E5M2)])
)
def test_interpreted_operation_matches_definition(name, dtype):
  operands = operands_of_op(name, dtype)()
  op: Op = getattr(ops, f"linear_{name}")
  out = getattr(kernel, op.name)(*operands, dtype=jnp.float32, interpret=True)
  # Kernel and definition sum the same values in different orders.
  assert_close(out, op.definition(*operands, dtype=jnp.float32), 2e-6)


def test_tiles_fit_the_result():
  assert kernel.pick_tile(8192, 4096) == TILES["paired"]
  assert kernel.pick_tile(4096, 11008) == TILES["paired"]
  assert kernel.pick_tile(512, 384) == TILES["tall"]
  assert kernel.pick_tile(384, 256) == TILES["low"]
  low = TILES["low"]
  assert all(low.fits(m, n) for m in (128, 384) for n in (128, 640))


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("name", quick(2, TILES))
def test_kernel_lowers_for_a_gpu(name, form):
  def product(a, b):
    return kernel.product(a, b, DTYPES[form], tile=TILES[name])

  specs = jax.eval_shape(lambda: exact_operands_of_ones(form))
  assert lowered_for_h200(product, *specs).count("mosaic_gpu_v2") == 1


def exact_operands_of_ones(form, m=512, n=512, k=256):
  scales = n if form == "wgrad" else n // BLOCK
  return tuple(
    QTensor(
      jnp.ones((rows, k), E4M3), jnp.ones((scale_rows, k // BLOCK)), BLOCK
    )
    for rows, scale_rows in ((m, m), (n, scales))
  )


def test_kernel_refuses_unsupported_arguments(monkeypatch):
  def trace(x, w, **how):
    jax.eval_shape(lambda x, w: kernel.linear_fwd(x, w, **how), x, w)

  x, w = jax.eval_shape(operands_of_op("fwd"))
  narrow = jax.eval_shape(operands_of_op("fwd", m=192))
  one_scale = w._replace(scale=jax.ShapeDtypeStruct((), jnp.float32))
  with refused("writes bfloat16, float16 or float32"):
    trace(x, w, dtype=E4M3)
  with refused(r"multiples of 128, got \[192, 128\] times \[128, 384\]"):
    trace(*narrow)
  with refused("one scale per tensor"):
    trace(x, one_scale)
  monkeypatch.setattr(kernel.device, "capability", lambda: 10.0)
  with refused(r"capability 9.0 \(Hopper\), got 10.0"):
    trace(x, w)


# The kernel supports only multiples of 128 rows.
@pytest.mark.parametrize("rows, name", [(256, "mosaic"), (192, "xla")])
def test_block_scaled_matmul_runs_on_mosaic_or_xla(rows, name):
  operands = jax.eval_shape(operands_of_op("fwd", m=rows))
  with for_h200():
    said = ops.explain(ops.linear_fwd, *operands)
  assert said.startswith(f"linear_fwd: {name} ")


@pytest.mark.gpu
@pytest.mark.parametrize("b_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("name", TILES)
def test_kernel_matches_numpy_on_a_gpu(name, form, b_dtype):
  tile = TILES[name]
  # The number of tiles is larger than the number of programs, but not a
  # multiple of it. Bands have unequal heights.
  m, n, k = 19 * tile.m, 18 * BLOCK, 33 * BLOCK
  a, b = exact_operands(form, m, n, k, b_dtype)
  add = None if form == "wgrad" else jnp.ones((m, n), jnp.bfloat16)

  @jax.jit
  def product(a, b, add):
    return kernel.product(a, b, DTYPES[form], add, tile=tile)

  first = np.asarray(product(a, b, add))
  assert_is_product(first, a, b, add)
  for _ in range(20):  # A race would cause an error only now and then.
    np.testing.assert_array_equal(np.asarray(product(a, b, add)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fwd", "dgrad", "wgrad"])
def test_operation_matches_definition_on_a_gpu(name):
  operands = operands_of_op(name, m=8192, d=4096, f=11008)()
  op: Op = getattr(ops, f"linear_{name}")
  out = jax.jit(lambda a, b: op(a, b, implementation="mosaic"))(*operands)
  expected = jax.jit(op.definition)(*operands)
  # Rounding to BF16 changes each of the two results by up to half a step.
  # Before that, they differ by less, because tensor cores accumulate blocks of
  # 128 with 14 bits. So BF16 results may differ by one step of the largest
  # value, and f32 results by the error of the sums.
  largest = float(jnp.max(jnp.abs(expected)))
  step = 2.0 ** (np.floor(np.log2(largest)) - 7)
  tolerance = step / largest if out.dtype == jnp.bfloat16 else 2.0**-8
  assert_close(out, expected, tolerance)
