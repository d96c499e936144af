# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's gated functions with their definitions.

Codes and scales of gate and up must be equal. Elsewhere XLA may contract a
product and a sum on one side and not on the other, so we require that most
codes are equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.pallas.triton import gated
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

# An f32 off by 2^-22 changes 1 code in 2^18 of E4M3, and fewer of E5M2.
SHARE = 0.999

# GELU's derivative has 1 - tanh(u)^2, off by some 2^-24, times up to 20.
SCALES_APART = {"silu": 1e-6, "gelu_tanh": 1e-5}
ACTIVATIONS = pytest.mark.parametrize("activation", SCALES_APART)


def run(fn, *args, jit=jit, activation="silu", **options):
  options["activation"] = activation
  traced = {k: options.pop(k) for k in TRACED if k in options}
  return jit(functools.partial(fn, **options))(*args, **traced)


def both(name, *args, **options):
  """Runs the kernel in the interpreter, and the definition."""
  kernel = run(getattr(gated, name), *args, interpret=True, **options)
  return kernel, run(getattr(ops, name).definition, *args, **options)


def inputs(shape, dtype=BF16):
  """Makes dy and gate_up, and quantizes them with `gated_input`."""
  *leading, f = shape
  gate_up = jnp.asarray(cases.activations((*leading, 2 * f)) / 8, dtype)
  dy = jnp.asarray(1e-3 * cases.activations(shape, 1), dtype)
  saved = run(ops.gated_input.definition, gate_up, groups=GROUPS)
  return dy, gate_up, saved


def assert_same_product(actual, expected, apart=SCALES_APART["silu"]):
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


def test_gated_kernel_of_degenerate_groups_matches_definition():
  groups = cases.finite_groups(48)
  gate = np.stack(list(groups.values()))
  # Every group as a gate beside an ordinary up, and the other way round.
  up = cases.activations(gate.shape)
  gate_up = np.block([[gate, up], [up, gate]])
  actual, expected = both("gated_input", jnp.asarray(gate_up), groups=GROUPS)
  assert_same_groups(actual[0], expected[0])
  assert_same_groups(actual[1], expected[1])
  np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)


def far_gates():
  """Makes gate and up [16, 16]; exp overflows for some gates, others are 0."""
  far = np.repeat([-500, -104, -88, -87, 87, 88, 104, 500], 16).reshape(8, 16)
  gate = np.concatenate([far, np.zeros_like(far)]).astype(np.float32)
  return gate, np.full_like(gate, -3.0)


@ACTIVATIONS
def test_gated_kernels_of_far_gates(activation):
  gate_up = jnp.asarray(np.concatenate(far_gates(), -1))
  how = dict(activation=activation)
  actual, (gate, up, scale) = both("gated_input", gate_up, groups=GROUPS, **how)
  np.testing.assert_allclose(actual[2], scale, rtol=1e-6)
  dy = jnp.linspace(-1, 1, 256).reshape(16, 16)
  options = dict(scale=scale, **how)
  actual, expected = both("gated_bwd_operands", dy, gate, up, **options)
  for a, e in zip(actual, expected, strict=True):
    assert_same_product(a, e, SCALES_APART[activation])
    assert not np.any(code_bits(a.columns) == 0xFF)


def test_gated_kernels_of_nonfinite_values():
  gate, up = far_gates()
  for i, group in enumerate(cases.nonfinite_groups(16).values()):
    gate[8 + i], up[12 + i] = group, group
  gate_up = jnp.asarray(np.concatenate([gate, up], -1))
  actual, (gate, up, scale) = both("gated_input", gate_up, groups=GROUPS)
  assert_same_groups(actual[0], gate)
  assert_same_groups(actual[1], up)
  assert np.isnan(actual[2]) and np.isnan(scale)
  # With a scale of 1 what is finite stays so beside what is not.
  options = dict(scale=jnp.float32(1))
  assert_same_product(*both("gated_fwd", gate, up, **options))
  dy = jnp.ones((16, 16))
  options = dict(scale=jnp.float32(1))
  actual, expected = both("gated_bwd_operands", dy, gate, up, **options)
  assert_same_product(actual[1], expected[1])
  assert np.isnan(actual[0].scale) and np.isnan(expected[0].scale)
  assert np.all(code_bits(actual[0].rows) == 0xFF)


@pytest.mark.parametrize(
  "shape, group_size, dtype, reason",
  [
    ((32, 2 * 100), 16, BF16, "multiple of"),
    ((32, 33), 16, BF16, "one width"),
    ((32, 2 * 96), 64, BF16, "multiple of the group size"),
    ((32, 2 * 96), 8, BF16, "groups of"),
    ((32, 2 * 96), 16, jnp.float16, "float16"),
    ((2**16, 2**16), 16, BF16, "int32"),
  ],
  ids=["ragged", "odd", "short-group", "group-size", "dtype", "too-large"],
)
def test_gated_kernel_refuses(shape, group_size, dtype, reason):
  kernel = functools.partial(
    gated.gated_input, activation="silu", groups=Groups(group_size)
  )
  with refused(reason):
    jax.eval_shape(kernel, jax.ShapeDtypeStruct(shape, dtype))


def test_gated_kernels_refuse_erf():
  dy, gate_up, (gate, up, scale) = inputs((16, 16))
  options = dict(activation="gelu")
  with refused("cannot lower erf"):
    gated.gated_input(gate_up, groups=GROUPS, **options)
  with refused("cannot lower erf"):
    gated.gated_fwd(gate, up, scale=scale, **options)
  with refused("cannot lower erf"):
    gated.gated_bwd_operands(dy, gate, up, scale=scale, **options)
  said = ops.explain(ops.gated_input, gate_up, groups=GROUPS, **options)
  assert said.startswith("gated_input: xla everywhere (")


def test_gated_kernels_refuse_residuals_that_do_not_fit():
  def q(*shape, group_size=16):
    codes = jnp.zeros(shape, jnp.float8_e4m3fn)
    scale = jnp.ones((*shape[:-1], shape[-1] // 16), BF16)
    return QTensor(codes, scale, group_size)

  def fwd(gate, up, layout="rows"):
    options = dict(scale=jnp.float32(1), layout=layout)
    gated.gated_fwd(gate, up, activation="silu", **options)

  def bwd(dy):
    options = dict(scale=jnp.float32(1))
    saved = q(32, 96), q(32, 96)
    gated.gated_bwd_operands(dy, *saved, activation="silu", **options)

  with refused("16 rows"):
    fwd(q(17, 96), q(17, 96), layout="both")
  with refused("scales of shape"):
    fwd(*[q(32, 96, group_size=32)] * 2)
  with refused("one shape"):
    fwd(q(32, 96), q(32, 48))
  with refused("dy must have"):
    bwd(jnp.zeros((32, 48), BF16))
  with refused("float16"):
    bwd(jnp.zeros((32, 96), jnp.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2048, 11008), (1008, 176)], ids=str)
@ACTIVATIONS
def test_gated_kernels_on_a_gpu(shape, dtype, activation):
  dy, gate_up, _ = inputs(shape, dtype)

  def on_both(name, *args, **options):
    options["activation"] = activation
    kernel = getattr(gated, name)(*args, **options)
    return kernel, run(
      getattr(ops, name).definition, *args, jit=jax.jit, **options
    )

  actual, expected = on_both("gated_input", gate_up, groups=GROUPS)
  gate, up, scale = expected
  for a, e in zip(actual[:2], expected[:2], strict=True):
    # Ties are common among bfloat16 values, and quotients off by a last bit.
    assert_same_codes(a.qvalue, e.qvalue, SHARE)
    np.testing.assert_array_equal(
      np.asarray(a.scale, np.float32), np.asarray(e.scale, np.float32)
    )
  np.testing.assert_allclose(actual[2], expected[2], rtol=1e-5)
  options = dict(scale=scale, layout="both")
  assert_near(*on_both("gated_fwd", gate, up, **options))
  options = dict(scale=scale)
  actual, expected = on_both("gated_bwd_operands", dy, gate, up, **options)
  for a, e in zip(actual, expected, strict=True):
    assert_near(a, e)


def assert_near(actual, expected):
  """Does `assert_same_product`, except for values left by a cancellation.

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
