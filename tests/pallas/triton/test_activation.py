# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's activation functions with their definitions.

Codes and scales of inputs must be equal. Elsewhere XLA may contract a product
and a sum on one side and not on the other, so we require that most codes are
equal.

GELU is also compared with float64, far below zero. There gradients are small,
and E5M2 resolves values of 2^-32 of the largest. Sigmoids that differ in their
last bit may give other codes; float64 decides which ones are right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor, quantize_with_scale
from coat_jax.ops import Groups
from coat_jax.pallas.triton import activation as kernels
from tests import cases, oracles
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

# An f32 off by 2^-22 changes 1 code in 2^18 of E4M3, and fewer of E5M2; off by
# 2^-20, from 1 + tanh, 1 code in 2^16.
SHARE = 0.999

# GELU's derivative has 1 - tanh(u)^2, off by some 2^-24, times up to 20.
SCALES_APART = {"silu": 1e-6, "gelu_tanh": 1e-5, "gelu_quick": 1e-5}
CASES = [(name, gated) for name in SCALES_APART for gated in (True, False)]
ALL = pytest.mark.parametrize("activation, gated", CASES)


def run(fn, *args, jit=jit, activation="silu", **options):
  options["activation"] = activation
  traced = {k: options.pop(k) for k in TRACED if k in options}
  return jit(functools.partial(fn, **options))(*args, **traced)


def both(name, *args, **options):
  """Runs the kernel in the interpreter, and the definition."""
  kernel = run(getattr(kernels, name), *args, interpret=True, **options)
  return kernel, run(getattr(ops, name).definition, *args, **options)


def inputs(shape, gated, dtype=BF16, least=-np.inf, **options):
  """Makes dy and x, and quantizes x with `activation_input`."""
  *leading, f = shape
  x = cases.activations((*leading, (1 + gated) * f)) / 8
  x = jnp.asarray(np.where(x < least, -x, x), dtype)
  dy = jnp.asarray(1e-3 * cases.activations(shape, 1), dtype)
  options |= dict(gated=gated, groups=GROUPS)
  return dy, x, run(ops.activation_input.definition, x, **options)


def assert_same_operand(actual, expected, apart=SCALES_APART["silu"]):
  """Compares the layouts of an operand, and its scale."""
  for layout in ("rows", "columns"):
    a, e = getattr(actual, layout), getattr(expected, layout)
    assert (a is None) == (e is None), layout
    if e is not None:
      assert_same_codes(a, e, SHARE)
  # Of the f32 that is the largest, a few ulp.
  np.testing.assert_allclose(actual.scale, expected.scale, rtol=apart)
  if actual.rows is not None and actual.columns is not None:
    rows = code_bits(actual.rows).reshape(-1, actual.rows.shape[-1])
    np.testing.assert_array_equal(rows.T, code_bits(actual.columns))


def assert_same_input(actual, expected):
  for a, e in zip(actual[0], expected[0], strict=True):
    assert_same_groups(a, e)
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


@ALL
def test_kernels_match_the_definition(activation, gated):
  """Uses a width of two tiles, the second of which is not full."""
  how = dict(activation=activation)
  dy, x, (parts, scale) = inputs((32, 176), gated, least=-2.0, **how)
  options = dict(gated=gated, groups=GROUPS)
  assert_same_input(*both("activation_input", x, **options, **how))
  how |= dict(scale=scale)
  assert_same_operand(*both("activation_fwd", parts, **how))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[0], expected[0], SCALES_APART[activation])
  assert_same_operand(actual[1], expected[1])


def in_float64(dy, x):
  """Computes gelu(x) and its gradient."""
  dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
  c = np.sqrt(2 / np.pi)
  u = c * (x + 0.044715 * x**3)
  cdf = (1 + np.tanh(u)) / 2
  derivative = cdf + 2 * x * cdf * (1 - cdf) * c * (1 + 3 * 0.044715 * x**2)
  return x * cdf, dy * derivative


def test_gelu_kernel_far_below_zero_equals_float64():
  how = dict(activation="gelu_tanh")
  dy, x, (parts, scale) = inputs((64, 176), False, F32, **how)
  assert np.min(x) < -5
  options = dict(scale=scale, interpret=True)
  bwd = kernels.activation_bwd_operands
  actual = run(bwd, dy, parts, **options, **how)
  values = in_float64(dy, parts[0].dequantize())
  for (operand, dtype), y in zip(
    [(actual[1], E4M3), (actual[0], E5M2)], values, strict=True
  ):
    expected = quantize_with_scale(
      jnp.asarray(y, F32), operand.scale, group_size=None, dtype=dtype
    )
    assert_same_codes(operand.columns, expected.qvalue.T, SHARE)


@pytest.mark.parametrize("activation, gated", CASES[:4])
def test_kernel_of_degenerate_groups_matches_definition(activation, gated):
  x = np.stack(list(cases.finite_groups(48).values()))
  if gated:
    # Every group as a gate beside an ordinary up, and the other way round.
    up = cases.activations(x.shape)
    x = np.block([[x, up], [up, x]])
  how = dict(activation=activation, gated=gated, groups=GROUPS)
  assert_same_input(*both("activation_input", jnp.asarray(x), **how))


def far_gates():
  """Makes gate and up [16, 16]; exp overflows for some gates, others are 0."""
  far = np.repeat([-500, -104, -88, -87, 87, 88, 104, 500], 16).reshape(8, 16)
  gate = np.concatenate([far, np.zeros_like(far)]).astype(np.float32)
  return gate, np.full_like(gate, -3.0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_kernels_of_far_gates(activation):
  gate_up = jnp.asarray(np.concatenate(far_gates(), -1))
  how = dict(activation=activation)
  options = dict(gated=True, groups=GROUPS, **how)
  actual, (parts, scale) = both("activation_input", gate_up, **options)
  np.testing.assert_allclose(actual[1], scale, rtol=1e-6)
  dy = jnp.linspace(-1, 1, 256).reshape(16, 16)
  options = dict(scale=scale, **how)
  actual, expected = both("activation_bwd_operands", dy, parts, **options)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    assert_same_operand(a, e, SCALES_APART[activation])
    assert not np.any(code_bits(a.columns) == 0xFF)


def test_gated_kernels_of_nonfinite_values():
  gate, up = far_gates()
  for i, group in enumerate(cases.nonfinite_groups(16).values()):
    gate[8 + i], up[12 + i] = group, group
  gate_up = jnp.asarray(np.concatenate([gate, up], -1))
  options = dict(gated=True, groups=GROUPS)
  actual, (parts, scale) = both("activation_input", gate_up, **options)
  for a, e in zip(actual[0], parts, strict=True):
    assert_same_groups(a, e)
  assert np.isnan(actual[1]) and np.isnan(scale)
  # With a scale of 1 what is finite stays so beside what is not.
  options = dict(scale=jnp.float32(1))
  assert_same_operand(*both("activation_fwd", parts, **options))
  dy = jnp.ones((16, 16))
  actual, expected = both("activation_bwd_operands", dy, parts, **options)
  assert_same_operand(actual[1], expected[1])
  assert np.isnan(actual[0].scale) and np.isnan(expected[0].scale)
  assert np.all(code_bits(actual[0].rows) == 0xFF)


def test_gelu_kernels_of_far_and_nonfinite_values():
  far = np.repeat([-1e30, -500, -20, -9.9, 9.9, 20, 500, 1e30], 16)
  x = np.concatenate([far.reshape(8, 16), np.ones((8, 16))]).astype(np.float32)
  for i, group in enumerate(cases.nonfinite_groups(16).values()):
    x[8 + i] = group
  how = dict(activation="gelu_tanh")
  options = dict(gated=False, groups=GROUPS, **how)
  actual, ((x,), scale) = both("activation_input", jnp.asarray(x), **options)
  assert_same_groups(actual[0][0], x)
  assert np.isnan(actual[1]) and np.isnan(scale)
  # With a scale of 1 what is finite stays so beside what is not.
  options = dict(scale=jnp.float32(1), **how)
  assert_same_operand(*both("activation_fwd", (x,), **options))
  far = dataclasses.replace(x, qvalue=x.qvalue[:8], scale=x.scale[:8])
  far = jax.tree.map(lambda a: jnp.tile(a, (2, 1)), far)
  dy = jnp.linspace(0.5, 1, 256).reshape(16, 16)
  for values, is_finite in ((far, True), (x, False)):
    actual, expected = both("activation_bwd_operands", dy, (values,), **options)
    assert_same_operand(actual[1], expected[1])
    # A gradient of 1e-30 is zero beside one of 1, with E5M2 as well.
    assert np.isfinite(actual[0].scale) == is_finite
    np.testing.assert_allclose(
      actual[0].scale, expected[0].scale, rtol=1e-5, equal_nan=True
    )
    is_nan = [code_bits(a[0].rows) == 0xFF for a in (actual, expected)]
    np.testing.assert_array_equal(*is_nan)


# What a kernel refuses -------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
  "shape, group_size, dtype, reason",
  [
    ((32, 100), 16, BF16, "multiple of"),
    ((32, 96), 64, BF16, "multiple of the group size"),
    ((32, 96), 8, BF16, "groups of"),
    ((32, 96), 16, jnp.float16, "float16"),
    ((2**16, 2**16), 16, BF16, "int32"),
  ],
  ids=["ragged", "short-group", "group-size", "dtype", "too-large"],
)
def test_kernel_refuses(shape, group_size, dtype, reason, gated):
  kernel = functools.partial(
    kernels.activation_input, activation="silu", groups=Groups(group_size)
  )
  shape = (*shape[:-1], (1 + gated) * shape[-1])
  with refused(reason):
    jax.eval_shape(
      functools.partial(kernel, gated=gated), jax.ShapeDtypeStruct(shape, dtype)
    )
  with refused("one width"):
    kernel(jnp.zeros((32, 33), BF16), gated=True)


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_refuse_erf(gated):
  dy, x, (parts, scale) = inputs((16, 16), gated)
  how, options = dict(activation="gelu"), dict(gated=gated, groups=GROUPS)
  with refused("cannot lower erf"):
    kernels.activation_input(x, **options, **how)
  with refused("cannot lower erf"):
    kernels.activation_fwd(parts, scale=scale, **how)
  with refused("cannot lower erf"):
    kernels.activation_bwd_operands(dy, parts, scale=scale, **how)
  said = ops.explain(ops.activation_input, x, **options, **how)
  assert said.startswith("activation_input: xla everywhere (")


def test_kernels_refuse_residuals_that_do_not_fit():
  def q(*shape, group_size=16):
    codes = jnp.zeros(shape, jnp.float8_e4m3fn)
    scale = jnp.ones((*shape[:-1], shape[-1] // 16), BF16)
    return QTensor(codes, scale, group_size)

  how = dict(activation="silu", scale=jnp.float32(1))

  def fwd(*parts, layout="rows"):
    kernels.activation_fwd(parts, layout=layout, **how)

  def bwd(dy, *parts, **options):
    kernels.activation_bwd_operands(dy, parts, **options, **how)

  dy = jnp.zeros((32, 96), BF16)
  for count in (1, 2):
    with refused("16 rows"):
      fwd(*[q(17, 96)] * count, layout="both")
    with refused("16 rows"):
      bwd(jnp.zeros((17, 96), BF16), *[q(17, 96)] * count)
    with refused("scales of shape"):
      fwd(*[q(32, 96, group_size=32)] * count)
    with refused("dy must have"):
      bwd(dy[:, :48], *[q(32, 96)] * count)
    with refused("float16"):
      bwd(dy.astype(jnp.float16), *[q(32, 96)] * count)
  with refused("one shape"):
    fwd(q(32, 96), q(32, 48))
  with refused("not of gate and up"):
    bwd(dy, q(32, 96), q(32, 96), has_sums=True)


# On a GPU --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2048, 11008), (1008, 176)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_kernels_on_a_gpu(shape, dtype, activation):
  dy, x, _ = inputs(shape, True, dtype)

  def on_both(name, *args, **options):
    options["activation"] = activation
    kernel = getattr(kernels, name)(*args, **options)
    return kernel, run(
      getattr(ops, name).definition, *args, jit=jax.jit, **options
    )

  options = dict(gated=True, groups=GROUPS)
  actual, expected = on_both("activation_input", x, **options)
  parts, scale = expected
  for a, e in zip(actual[0], parts, strict=True):
    # Ties are common among bfloat16 values, and quotients off by a last bit.
    assert_same_codes(a.qvalue, e.qvalue, SHARE)
    np.testing.assert_array_equal(
      np.asarray(a.scale, np.float32), np.asarray(e.scale, np.float32)
    )
  np.testing.assert_allclose(actual[1], scale, rtol=1e-5)
  options = dict(scale=scale, layout="both")
  assert_near(*on_both("activation_fwd", parts, **options))
  options = dict(scale=scale)
  actual, expected = on_both("activation_bwd_operands", dy, parts, **options)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    assert_near(a, e)


def assert_near(actual, expected):
  """Does `assert_same_operand`, except for values left by a cancellation.

  The derivative is zero at -1.278, and E5M2 shows 2^-32 of the largest.
  """
  np.testing.assert_allclose(actual.scale, expected.scale, rtol=1e-5)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    if e is None:
      continue
    apart = oracles.codes_apart(code_bits(a), code_bits(e))
    assert np.mean(apart == 0) >= SHARE
    far = apart > 1
    difference = np.asarray(a, np.float32)[far] - np.asarray(e, np.float32)[far]
    largest = np.max(np.abs(np.asarray(e, np.float32)))
    assert np.all(np.abs(difference) <= 2.0**-20 * largest)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2048, 5504), (1008, 176)], ids=str)
def test_gelu_kernels_on_a_gpu(shape, dtype):
  how = dict(activation="gelu_tanh")
  dy, x, (parts, scale) = inputs(shape, False, dtype, **how)
  (actual,), amax = kernels.activation_input(
    x, gated=False, groups=GROUPS, **how
  )
  # Ties are common among bfloat16 values, and quotients off by a last bit.
  assert_same_codes(actual.qvalue, parts[0].qvalue, SHARE)
  np.testing.assert_allclose(amax, scale, rtol=1e-5)
  *operands, sums = kernels.activation_bwd_operands(
    dy, parts, scale=scale, has_sums=True, **how
  )
  y = kernels.activation_fwd(parts, scale=scale, layout="both", **how)
  np.testing.assert_array_equal(
    code_bits(y.columns), code_bits(operands[1].columns)
  )
  values = in_float64(dy, parts[0].dequantize())
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
