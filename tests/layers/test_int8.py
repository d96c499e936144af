# SPDX-License-Identifier: Apache-2.0
"""Tests the `int8` recipe: matmuls and saved arrays are INT8, not FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from coat_jax import recipes
from coat_jax.layers import (
  BlockWeights,
  Elementwise,
  LinearWeights,
  block,
  linear,
)
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through, test_gated_mlp
from tests.layers.test_residuals import CONFIG, T, kinds
from tests.matrices import quick
from tests.pallas.kernels import for_h200
from train.memory.count import residual_arrays

INT8 = recipes.int8()


def codes(x):
  """Returns the INT8 codes of x, as integers, and their scale in float64."""
  scale = np.float64(np.float32(np.abs(x).max()) * np.float32(1 / 127))
  return np.rint(np.float64(x) / scale).astype(np.int64), scale


def test_linear_computes_three_integer_matmuls():
  rng = np.random.default_rng(0)
  x, w, dy = (rng.normal(size=s) for s in ((48, 32), (32, 40), (48, 40)))
  dy = dy * np.geomspace(1, 2.0**-10, 48)[:, None]  # Most codes of dy are 0.
  arrays = [jnp.float32(a) for a in (x, w, dy)]

  @jit
  def run(x, w, dy):
    y, vjp = jax.vjp(lambda *args: linear(*args, recipe=INT8), x, w)
    return y, vjp(dy)

  y, (dx, dw) = run(*arrays)
  (x, sx), (w, sw), (g, sg) = map(codes, map(np.asarray, arrays))
  for got, want, scale in (
    (y, x @ w, sx * sw),
    (dx, g @ w.T, sg * sw),
    (dw, x.T @ g, sx * sg),
  ):
    # Integer sums are exact. Only scales and their products are rounded.
    np.testing.assert_allclose(got, want * scale, rtol=2**-21)
  assert not np.any(dx[-1]) and np.any(np.asarray(arrays[2])[-1])


@functools.partial(jit, static_argnums=(3,))
def layer(x, weights, dy, recipe):
  f = functools.partial(
    block, middle=Elementwise(), kind="rms", eps=1e-5, recipe=recipe
  )
  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@functools.partial(jit, static_argnums=(3,))
def oracle(x, weights, dy, residuals):
  def f(x, weights):
    return straight_through.gated_mlp(
      x, weights, "rms", 1e-5, residuals, formats=INT8.formats
    )

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@pytest.mark.parametrize("residuals", quick(1, ["minimal", "coat"]))
def test_block_matches_the_formula_at_its_codes(residuals):
  x, weights, dy = test_gated_mlp.case((2, 6))
  y, gradients = layer(x, weights, dy, recipes.int8(residuals=residuals))
  want, want_gradients = oracle(x, weights, dy, residuals)
  assert_same_bits(y, want)
  assert_close(gradients, want_gradients)


@pytest.mark.slow
def test_layer_saves_the_same_arrays_as_coat_but_in_int8():
  coat, int8 = (
    kinds(a for a, _ in residual_arrays(CONFIG, recipe, tokens=T))
    for recipe in (recipes.coat(attention="fp8"), recipes.int8(attention="fp8"))
  )
  assert int8 == {
    (jnp.dtype("int8") if dtype.itemsize == 1 else dtype, shape): count
    for (dtype, shape), count in coat.items()
  }


def dot_dtypes(jaxpr):
  """Returns the dtypes of matmuls, and the primitives that call kernels."""
  dots, kernels = set(), set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      dots.add(tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)))
    # The primitive mpmd_map calls a Mosaic GPU kernel.
    if eqn.primitive.name in ("pallas_call", "mpmd_map"):
      kernels.add(eqn.primitive.name)
    for sub in jaxprs_in_params(eqn.params):
      for found, more in zip((dots, kernels), dot_dtypes(sub), strict=True):
        found |= more
  return dots, kernels


@pytest.mark.slow
def test_on_a_gpu_matmuls_are_integer_and_no_kernel_runs():
  # The kernels of the `coat` recipe support these shapes.
  x = jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)
  f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  weights = BlockWeights(
    LinearWeights(f32((128, 2, 128)), gamma=f32((128,))),
    LinearWeights(f32((128, 128))),
  )
  found = {}
  for name, recipe in (("int8", INT8), ("coat", recipes.coat())):
    f = functools.partial(
      block, middle=Elementwise(), kind="rms", eps=1e-5, recipe=recipe
    )
    with for_h200():
      traced = jax.make_jaxpr(lambda x, w, dy, f=f: jax.vjp(f, x, w)[1](dy))(
        x, weights, x
      )
    found[name] = dot_dtypes(traced.jaxpr)
  assert found["int8"] == ({("int8", "int8", "int32")}, set())
  assert found["coat"][1]
