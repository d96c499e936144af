# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's GELU with its definition, far below zero with float64.

There gradients are small, and E5M2 resolves values of 2^-32 of the largest.
Sigmoids that differ in their last bit may give other codes; float64 decides
which ones are right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import quantize_with_scale
from coat_jax.ops import Groups
from coat_jax.pallas.triton import gelu
from tests import cases
from tests.comparing import jit
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  code_bits,
  refused,
)

BF16, F32 = jnp.bfloat16, jnp.float32
GROUPS = Groups(16)
# Names of arguments that are arrays; the others are static.
TRACED = ("scale",)

# An f32 off by 2^-20, from 1 + tanh, changes 1 code in 2^16 of E4M3.
SHARE = 0.999


def run(fn, *args, jit=jit, approximate=True, **options):
  traced = {k: options.pop(k) for k in TRACED if k in options}
  fn = functools.partial(fn, approximate=approximate, **options)
  return jit(fn)(*args, **traced)


def both(name, *args, **options):
  """Runs the kernel in the interpreter, and the definition."""
  kernel = run(getattr(gelu, name), *args, interpret=True, **options)
  return kernel, run(getattr(ops, name).definition, *args, **options)


def inputs(shape, dtype=BF16, least=-2.0, **options):
  """Makes dy and x, and quantizes x with `gelu_input`."""
  x = cases.activations(shape) / 8
  x = jnp.asarray(np.where(x < least, -x, x), dtype)
  dy = jnp.asarray(1e-3 * cases.activations(shape, 1), dtype)
  return dy, x, run(ops.gelu_input.definition, x, groups=GROUPS, **options)


def assert_same_matrix(actual, expected):
  """Compares the layouts of an operand, and its scale."""
  for layout in ("rows", "columns"):
    a, e = getattr(actual, layout), getattr(expected, layout)
    assert (a is None) == (e is None), layout
    if e is not None:
      assert_same_codes(a, e, SHARE)
  # 1 - tanh(u)^2, off by some 2^-24, is multiplied by up to 20 at x = 5.
  np.testing.assert_allclose(actual.scale, expected.scale, rtol=1e-5)
  if actual.rows is not None and actual.columns is not None:
    rows = code_bits(actual.rows).reshape(-1, actual.rows.shape[-1])
    np.testing.assert_array_equal(rows.T, code_bits(actual.columns))


def test_quick_gelu_kernels_match_the_definition():
  """Uses a width of two tiles, the second of which is not full."""
  quick = dict(approximate="sigmoid")
  dy, x, (x_q, scale) = inputs((32, 176), **quick)
  actual, expected = both("gelu_input", x, groups=GROUPS, **quick)
  assert_same_groups(actual[0], expected[0])
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)
  assert_same_matrix(*both("gelu_fwd", x_q, scale=scale, **quick))
  options = quick | dict(scale=scale)
  actual, expected = both("gelu_bwd_operands", dy, x_q, **options)
  assert_same_matrix(actual[0], expected[0])
  assert_same_matrix(actual[1], expected[1])


def in_float64(dy, x):
  """Computes gelu(x) and its gradient."""
  dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
  c = np.sqrt(2 / np.pi)
  u = c * (x + 0.044715 * x**3)
  cdf = (1 + np.tanh(u)) / 2
  derivative = cdf + 2 * x * cdf * (1 - cdf) * c * (1 + 3 * 0.044715 * x**2)
  return x * cdf, dy * derivative


def test_gelu_kernel_far_below_zero_equals_float64():
  dy, x, (x_q, scale) = inputs((64, 176), F32, least=-np.inf)
  assert np.min(x) < -5
  options = dict(scale=scale)
  actual = run(gelu.gelu_bwd_operands, dy, x_q, interpret=True, **options)
  values = in_float64(dy, x_q.dequantize())
  for (operand, dtype), y in zip(
    [(actual[1], E4M3), (actual[0], E5M2)], values, strict=True
  ):
    expected = quantize_with_scale(
      jnp.asarray(y, F32), operand.scale, group_size=None, dtype=dtype
    )
    assert_same_codes(operand.columns, expected.qvalue.T, SHARE)


def test_gelu_kernel_of_degenerate_groups_matches_definition():
  groups = cases.finite_groups(48)
  x = jnp.asarray(np.stack(list(groups.values())))
  actual, expected = both("gelu_input", x, groups=GROUPS)
  assert_same_groups(actual[0], expected[0])
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def test_gelu_kernels_of_far_and_nonfinite_values():
  far = np.repeat([-1e30, -500, -20, -9.9, 9.9, 20, 500, 1e30], 16)
  x = np.concatenate([far.reshape(8, 16), np.ones((8, 16))]).astype(np.float32)
  for i, group in enumerate(cases.nonfinite_groups(16).values()):
    x[8 + i] = group
  actual, (x, scale) = both("gelu_input", jnp.asarray(x), groups=GROUPS)
  assert_same_groups(actual[0], x)
  assert np.isnan(actual[1]) and np.isnan(scale)
  # With a scale of 1 what is finite stays so beside what is not.
  options = dict(scale=jnp.float32(1))
  assert_same_matrix(*both("gelu_fwd", x, **options))
  options = dict(scale=jnp.float32(1))
  far = dataclasses.replace(x, qvalue=x.qvalue[:8], scale=x.scale[:8])
  far = jax.tree.map(lambda a: jnp.tile(a, (2, 1)), far)
  dy = jnp.linspace(0.5, 1, 256).reshape(16, 16)
  for values, is_finite in ((far, True), (x, False)):
    actual, expected = both("gelu_bwd_operands", dy, values, **options)
    assert_same_matrix(actual[1], expected[1])
    # A gradient of 1e-30 is zero beside one of 1, with E5M2 as well.
    assert np.isfinite(actual[0].scale) == is_finite
    np.testing.assert_allclose(
      actual[0].scale, expected[0].scale, rtol=1e-5, equal_nan=True
    )
    is_nan = [code_bits(a[0].rows) == 0xFF for a in (actual, expected)]
    np.testing.assert_array_equal(*is_nan)


@pytest.mark.parametrize(
  "shape, dtype, options, reason",
  [
    ((32, 100), BF16, {}, "multiple of"),
    ((32, 96), BF16, {"groups": Groups(64)}, "multiple of the group size"),
    ((32, 96), BF16, {"groups": Groups(8)}, "groups of"),
    ((32, 96), jnp.float16, {}, "float16"),
    ((32, 96), BF16, {"approximate": False}, "cannot lower erf"),
  ],
  ids=["ragged", "short-group", "group-size", "dtype", "erf"],
)
def test_gelu_kernel_refuses(shape, dtype, options, reason):
  options = {"approximate": True, "groups": GROUPS} | options
  with refused(reason):
    gelu.gelu_input(jnp.zeros(shape, dtype), **options)


def test_gelu_kernels_refuse_residuals_that_do_not_fit():
  dy, _, (x, scale) = inputs((17, 48))
  options = dict(approximate=True)
  with refused("16 rows"):
    gelu.gelu_fwd(x, scale=scale, layout="both", **options)
  with refused("cannot lower erf"):
    gelu.gelu_fwd(x, scale=scale, approximate=False)
  bwd = functools.partial(gelu.gelu_bwd_operands, scale=scale, **options)
  with refused("16 rows"):
    bwd(dy, x)
  with refused("dy must have"):
    bwd(dy[:16], x)
  with refused("scales of shape"):
    bwd(dy, dataclasses.replace(x, scale=x.scale[:, :1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2048, 5504), (1008, 176)], ids=str)
def test_gelu_kernels_on_a_gpu(shape, dtype):
  dy, x, (x_q, scale) = inputs(shape, dtype, least=-np.inf)
  options = dict(approximate=True)
  actual, amax = gelu.gelu_input(x, groups=GROUPS, **options)
  expected, expected_amax = run(ops.gelu_input.definition, x, groups=GROUPS)
  # Ties are common among bfloat16 values, and quotients off by a last bit.
  assert_same_codes(actual.qvalue, expected.qvalue, SHARE)
  np.testing.assert_allclose(amax, expected_amax, rtol=1e-5)
  *operands, sums = gelu.gelu_bwd_operands(
    dy, x_q, scale=scale, has_sums=True, **options
  )
  y = gelu.gelu_fwd(x_q, scale=scale, layout="both", **options)
  np.testing.assert_array_equal(
    code_bits(y.columns), code_bits(operands[1].columns)
  )
  values = in_float64(dy, x_q.dequantize())
  for operand, dtype, v in zip(
    (y, operands[0]), (E4M3, E5M2), values, strict=True
  ):
    expected = quantize_with_scale(
      jnp.asarray(v, F32), operand.scale, group_size=None, dtype=dtype
    ).qvalue
    np.testing.assert_array_equal(
      code_bits(operand.rows).T, code_bits(operand.columns)
    )
    # By value: below -20 the kernel's gradient is 0 and the exact one -0.
    codes, expected = (
      np.asarray(x, np.float32) for x in (operand.rows, expected)
    )
    # The derivative is zero at -0.75: what cancels there is off by more.
    assert np.mean(codes == expected) >= SHARE
    difference = np.abs(codes - expected)
    assert np.all(difference <= np.abs(expected) / 4 + 1)
  # A sum in f32 is off by less than 2^-14 of all that it adds up.
  limit = 2**-14 * np.sum(np.abs(values[1]), axis=0)
  assert np.all(np.abs(sums - np.sum(values[1], axis=0)) <= limit)
