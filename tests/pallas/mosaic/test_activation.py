# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's activation functions with their definitions.

Codes and scales of inputs must be equal. Most other codes must be equal, but
not all, because on one side XLA may fuse a product and a sum, which rounds once
instead of twice. The interpreter computes the sigmoid with jnp; its PTX is
tested on a GPU and by tests/aot/test_rows.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor, quantize_with_scale
from coat_jax.ops import Groups
from coat_jax.pallas.mosaic import activation as kernels
from coat_jax.pallas.mosaic.activation_input import activation_input
from tests import cases, oracles
from tests.comparing import assert_close, jit
from tests.matrices import quick
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  code_bits,
  refused,
)

BF16, F32 = jnp.bfloat16, jnp.float32
# Names of keyword arguments that are arrays. The others are static.
TRACED = ("scale", "factor")

# An error of 2^-22 in f32 changes 1 E4M3 code in 2^18, and fewer E5M2 codes. An
# error of 2^-20, which 1 + tanh may have, changes 1 in 2^16.
SHARE = 0.999

# GELU's derivative contains 1 - tanh(u)^2, whose error of about 2^-24 is
# multiplied by up to 20.
SCALES_APART = {"silu": 1e-6, "gelu_tanh": 1e-5, "gelu_quick": 1e-5}
CASES = [(name, gated) for name in SCALES_APART for gated in (True, False)]
ALL = pytest.mark.parametrize("activation, gated", CASES)

# The first shape is not a multiple of a tile along either axis. The second has
# tiles of 32 rows and groups of 128. In the third, warpgroups of the backward
# pass compute several tiles.
SIZES = [((80, 144), 16), ((48, 256), 128), ((144, 528), 16)]
SHAPES = pytest.mark.parametrize("shape, group_size", SIZES, ids=str)
# The first six have each activation function, and each size with and without a
# gate.
EVERY = [
  (*SIZES[(i + shift) % 3], *case)
  for shift in range(3)
  for i, case in enumerate(CASES)
]


def run(fn, *args, jit=jit, activation="silu", **options):
  options["activation"] = activation
  traced = {k: options.pop(k) for k in TRACED if k in options}
  return jit(functools.partial(fn, **options))(*args, **traced)


def both(name, *args, **options):
  """Runs the kernel in the interpreter, and its definition."""
  op = getattr(ops, name)
  kernel = run(op.kernel("mosaic"), *args, interpret=True, **options)
  return kernel, run(op.definition, *args, **options)


def inputs(shape, gated, group_size=16, dtype=BF16, least=-np.inf):
  """Makes dy, x and the options of `activation_input`.

  Values of x below `least` are negated.
  """
  *leading, f = shape
  x = cases.activations((*leading, (1 + gated) * f)) / 8
  x = jnp.asarray(np.where(x < least, -x, x), dtype)
  dy = jnp.asarray(1e-3 * cases.activations(shape, 1), dtype)
  return dy, x, dict(gated=gated, groups=Groups(group_size))


def assert_same_operand(actual, expected, apart=SCALES_APART["silu"]):
  """Compares the codes of both layouts of an operand, and its scale."""
  for layout in ("rows", "columns"):
    a, e = getattr(actual, layout), getattr(expected, layout)
    assert (a is None) == (e is None), layout
    if e is not None:
      assert_same_codes(a, e, SHARE)
  # The largest value may be off by a few ulp of f32.
  np.testing.assert_allclose(actual.scale, expected.scale, rtol=apart)
  if actual.rows is not None and actual.columns is not None:
    rows = code_bits(actual.rows).reshape(-1, actual.rows.shape[-1])
    np.testing.assert_array_equal(rows.T, code_bits(actual.columns))


def assert_near(actual, expected):
  """Compares like `assert_same_operand`, but allows small absolute errors.

  SiLU's derivative is almost zero near -1.278, and GELU's near -0.75, because
  terms cancel, but E5M2 resolves values as small as 2^-32 of the largest.
  """
  np.testing.assert_allclose(actual.scale, expected.scale, rtol=1e-5)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    if e is None:
      continue
    apart = oracles.codes_apart(code_bits(a), code_bits(e))
    assert np.mean(apart == 0) >= SHARE
    far = apart > 1
    difference = np.asarray(a, F32)[far] - np.asarray(e, F32)[far]
    largest = np.max(np.abs(np.asarray(e, F32)))
    assert np.all(np.abs(difference) <= 2.0**-20 * largest)


def assert_same_input(actual, expected):
  for a, e in zip(actual[0], expected[0], strict=True):
    assert_same_groups(a, e)
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize(
  "shape, group_size, activation, gated", quick(6, EVERY), ids=str
)
def test_kernels_match_the_definition(shape, group_size, activation, gated):
  dy, x, options = inputs(shape, gated, group_size, least=-2.0)
  how = dict(activation=activation)
  actual, (parts, scale) = both("activation_input", x, **options, **how)
  assert_same_input(actual, (parts, scale))
  how |= dict(scale=scale * 0.8)  # Makes some values exceed qmax.
  assert_same_operand(*both("activation_fwd", parts, **how))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[0], expected[0], SCALES_APART[activation])
  assert_same_operand(actual[1], expected[1])


@SHAPES
def test_kernel_sums_a_bias_gradient(shape, group_size):
  dy, x, options = inputs((2, shape[0] // 2, shape[1]), False, group_size)
  how = dict(activation="silu")
  _, (parts, scale) = both("activation_input", x, **options, **how)
  how |= dict(scale=scale, has_sums=True)
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  # The sums have 80 terms in f32.
  assert_close(actual[2], expected[2], 2e-6)
  assert actual[0].rows.shape == x.shape


@pytest.mark.parametrize("in_up", [True, False])
def test_gated_kernels_propagate_nan(in_up):
  _, x, options = inputs((32, 128), True, dtype=F32)
  groups = np.stack(list(cases.nonfinite_groups(16).values()))
  at = 128 if in_up else 0
  x = x.at[: len(groups), at : at + 16].set(groups)
  how = dict(activation="silu")
  actual, (parts, scale) = both("activation_input", x, **options, **how)
  for a, e in zip(actual[0], parts, strict=True):
    assert_same_groups(a, e)
  assert np.isnan(actual[1]) and np.isnan(scale)
  # With a scale of 1, finite values must stay finite.
  how |= dict(scale=jnp.float32(1))
  assert_same_operand(*both("activation_fwd", parts, **how))
  dy = jnp.ones((32, 128))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[1], expected[1])
  assert np.isnan(actual[0].scale) and np.isnan(expected[0].scale)


# Unsupported arguments -------------------------------------------------------


def test_kernels_refuse_small_arrays():
  x = jnp.zeros((32, 192), BF16)
  how = dict(groups=Groups(16))
  with refused(r"at least 32 x 128, got \[32, 96\]"):
    activation_input(x, activation="silu", gated=True, **how)
  parts = (ops.quantize_groups(x[:16, :48], **how),)
  how = dict(activation="silu", scale=jnp.float32(1))
  with refused("least 1024 values, got 768"):
    kernels.activation_fwd(parts, **how)
  parts = (ops.quantize_groups(x[:16], groups=Groups(16)),)
  with refused(r"got \[16, 192\]"):
    kernels.activation_bwd_operands(x[:16], parts, **how)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
  "shape, group_size, dtype, reason",
  [
    ((32, 100), 16, BF16, "multiple of"),
    ((32, 96), 64, BF16, "multiple of the group size"),
    ((32, 96), 8, BF16, "group sizes"),
    ((32, 96), 16, jnp.float16, "float16"),
    ((2**16, 2**16), 16, BF16, "int32"),
  ],
  ids=["ragged", "short-group", "group-size", "dtype", "too-large"],
)
def test_activation_input_refuses_unsupported_arguments(
  shape, group_size, dtype, reason, gated
):
  kernel = functools.partial(
    activation_input, activation="silu", groups=Groups(group_size)
  )
  shape = (*shape[:-1], (1 + gated) * shape[-1])
  with refused(reason):
    jax.eval_shape(
      functools.partial(kernel, gated=gated), jax.ShapeDtypeStruct(shape, dtype)
    )
  with refused("same width"):
    kernel(jnp.zeros((32, 33), BF16), gated=True)


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_refuse_gelu_by_erf(gated):
  dy, x, options = inputs((32, 128), gated)
  how = dict(activation="gelu")
  parts, scale = run(ops.activation_input.definition, x, **options, **how)
  with refused("cannot lower erf"):
    activation_input(x, **options, **how)
  with refused("cannot lower erf"):
    kernels.activation_fwd(parts, scale=scale, **how)
  with refused("cannot lower erf"):
    kernels.activation_bwd_operands(dy, parts, scale=scale, **how)
  said = ops.explain(ops.activation_input, x, **options, **how)
  assert said.startswith("activation_input: xla everywhere (")


def test_kernels_refuse_saved_arrays_of_wrong_shapes():
  def q(*shape, group_size=16):
    codes = jnp.zeros(shape, jnp.float8_e4m3fn)
    scale = jnp.ones((*shape[:-1], shape[-1] // 16), BF16)
    return QTensor(codes, scale, group_size)

  how = dict(activation="silu", scale=jnp.float32(1))

  def bwd(dy, *parts, **options):
    kernels.activation_bwd_operands(dy, parts, **options, **how)

  dy = jnp.zeros((32, 96), BF16)
  for count in (1, 2):
    with refused("multiple of 16"):
      bwd(jnp.zeros((17, 96), BF16), *[q(17, 96)] * count)
    with refused("scales of shape"):
      kernels.activation_fwd((q(32, 96, group_size=32),) * count, **how)
    with refused("dy must have"):
      bwd(dy[:, :48], *[q(32, 96)] * count)
    with refused("float16"):
      bwd(dy.astype(jnp.float16), *[q(32, 96)] * count)
  with refused("same shape"):
    kernels.activation_fwd((q(32, 96), q(32, 48)), **how)
  with refused("not for gate and up"):
    bwd(dy, q(32, 96), q(32, 96), has_sums=True)


# On a GPU --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "shape, group_size",
  [((2048, 11008), 16), ((1008, 176), 16), ((1008, 1408), 128)],
  ids=str,
)
@ALL
def test_kernels_on_a_gpu(shape, group_size, activation, gated, dtype):
  check_kernels(shape, group_size, activation, gated, dtype, 1e-5)


def check_kernels(
  shape, group_size, activation, gated, dtype, apart, factor=None
):
  """Compares compiled kernels with their definitions."""
  dy, x, options = inputs(shape, gated, group_size, dtype)

  def on_both(name, *args, **options):
    options |= dict(activation=activation, factor=factor)
    op = getattr(ops, name)
    kernel = op.kernel("mosaic")(*args, **options)
    return kernel, run(op.definition, *args, jit=jax.jit, **options)

  actual, (parts, scale) = on_both("activation_input", x, **options)
  for a, e in zip(actual[0], parts, strict=True):
    # Ties are common among bfloat16 values, and XLA's quotients may be off.
    assert_same_codes(a.qvalue, e.qvalue, SHARE)
    np.testing.assert_array_equal(a.scale.astype(F32), e.scale.astype(F32))
  np.testing.assert_allclose(actual[1], scale, rtol=apart)
  assert_near(*on_both("activation_fwd", parts, scale=scale))
  options = dict(scale=scale, has_sums=not gated)
  actual, expected = on_both("activation_bwd_operands", dy, parts, **options)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    assert_near(a, e)
  if factor is not None:
    most = np.abs(expected[3]).max()
    np.testing.assert_allclose(actual[3], expected[3], atol=1e-5 * most)
  if not gated:
    # A sum in f32 is off by less than 2^-14 of the sum of magnitudes.
    limit = 2**-14 * np.sum(np.abs(np.asarray(dy, np.float64)), axis=0)
    assert np.all(np.abs(actual[2] - expected[2]) <= limit)


@pytest.mark.gpu
@ALL
def test_kernels_on_large_values_on_a_gpu(activation, gated):
  check_far_values(activation, gated)


def check_far_values(activation, gated):
  """Checks NaN, infinities, and values for which exp overflows."""
  far = [-1e30, -500, -104, -88, -20, -9.9, 0, 9.9, 20, 88, 104, 500, 1e30]
  x = np.full((32, 128), 0.5, np.float32)
  x[: len(far), :16] = np.float32(far)[:, None]
  dy = jnp.linspace(0.5, 1, x.size).reshape(x.shape)
  nonfinite = np.stack(list(cases.nonfinite_groups(16).values()))
  for is_finite in (True, False):
    if not is_finite:
      x[len(far) : len(far) + len(nonfinite), :16] = nonfinite
    values = ops.quantize_groups(jnp.asarray(x), groups=Groups(16))
    other = ops.quantize_groups(jnp.full(x.shape, -3.0), groups=Groups(16))
    parts = (values, other) if gated else (values,)
    # With a scale of 1, finite values stay finite next to nonfinite ones.
    how = dict(activation=activation, scale=jnp.float32(1))
    fwd = [
      run(fn, parts, **how)
      for fn in (kernels.activation_fwd, ops.activation_fwd.definition)
    ]
    assert_same_operand(*fwd)
    bwd = [
      run(fn, dy, parts, **how)
      for fn in (
        kernels.activation_bwd_operands,
        ops.activation_bwd_operands.definition,
      )
    ]
    assert_same_operand(*(found[1] for found in bwd))
    actual, expected = (found[0] for found in bwd)
    # Without a gate, the scale depends only on dy, which is finite.
    assert np.isfinite(actual.scale) == (is_finite or not gated)
    np.testing.assert_allclose(
      actual.scale, expected.scale, rtol=1e-5, equal_nan=True
    )
    is_nan = [code_bits(a.rows) == 0xFF for a in (actual, expected)]
    np.testing.assert_array_equal(*is_nan)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2048, 5504), (1008, 176)], ids=str)
def test_gelu_kernels_are_close_to_float64_on_a_gpu(shape, dtype):
  check_gelu(shape, dtype)


def check_gelu(shape, dtype):
  """Compares codes and sums with float64, even far below zero.

  Far below zero, gradients are small, but E5M2 resolves values as small as
  2^-32 of the largest.
  """
  dy, x, options = inputs(shape, False, dtype=dtype)
  how = dict(activation="gelu_tanh")
  parts, scale = run(ops.activation_input.definition, x, **options, **how)
  *operands, sums, _ = kernels.activation_bwd_operands(
    dy, parts, scale=scale, has_sums=True, **how
  )
  y = kernels.activation_fwd(parts, scale=scale, **how)
  np.testing.assert_array_equal(
    code_bits(y.rows).T, code_bits(operands[1].columns)
  )
  values = in_float64(dy, parts[0].dequantize())
  for operand, dtype, v in zip(
    (y, operands[0]), (E4M3, E5M2), values, strict=True
  ):
    expected = quantize_with_scale(
      jnp.asarray(v, F32), operand.scale, group_size=None, dtype=dtype
    ).qvalue
    # Compare values, because below -20 the kernel's gradient is 0 and the exact
    # one is -0.
    codes, expected = (np.asarray(x, F32) for x in (operand.rows, expected))
    # Errors are larger near -0.75, where the derivative's terms cancel.
    assert np.mean(codes == expected) >= SHARE
    difference = np.abs(codes - expected)
    assert np.all(difference <= np.abs(expected) / 4 + 1)
  # A sum in f32 is off by less than 2^-14 of the sum of magnitudes.
  limit = 2**-14 * np.sum(np.abs(values[1]), axis=0)
  assert np.all(np.abs(sums - np.sum(values[1], axis=0)) <= limit)


def in_float64(dy, x):
  """Computes gelu(x), and the gradient of x for an output gradient dy."""
  dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
  c = np.sqrt(2 / np.pi)
  u = c * (x + 0.044715 * x**3)
  cdf = (1 + np.tanh(u)) / 2
  derivative = cdf + 2 * x * cdf * (1 - cdf) * c * (1 + 3 * 0.044715 * x**2)
  return x * cdf, dy * derivative
