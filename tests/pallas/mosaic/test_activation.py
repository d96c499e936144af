# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's activation functions with their definitions.

Codes and scales of inputs must be equal. Elsewhere XLA may contract a product
and a sum on one side and not on the other, so we require that most codes are
equal. The interpreter computes the definition's sigmoid; what the PTX computes
is tested on a GPU and by tests/aot/test_rows.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops import Groups
from coat_jax.pallas.mosaic import activation as kernels
from tests import cases
from tests.comparing import assert_close
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  refused,
)
from tests.pallas.triton.test_activation import (
  ALL,
  SCALES_APART,
  SHARE,
  assert_near,
  assert_same_input,
  assert_same_operand,
  run,
)

BF16, F32 = jnp.bfloat16, jnp.float32

# Tiles over both edges; then low ones with one group per row.
SHAPES = pytest.mark.parametrize(
  "shape, group_size", [((80, 144), 16), ((48, 256), 128)], ids=str
)


def both(name, *args, **options):
  """Runs the kernel in the interpreter, and the definition."""
  kernel = run(getattr(kernels, name), *args, interpret=True, **options)
  return kernel, run(getattr(ops, name).definition, *args, **options)


def inputs(shape, gated, group_size=16, dtype=BF16, least=-np.inf):
  """Makes dy, x and the options of `activation_input`."""
  *leading, f = shape
  x = cases.activations((*leading, (1 + gated) * f)) / 8
  x = jnp.asarray(np.where(x < least, -x, x), dtype)
  dy = jnp.asarray(1e-3 * cases.activations(shape, 1), dtype)
  return dy, x, dict(gated=gated, groups=Groups(group_size))


@SHAPES
@ALL
def test_kernels_match_the_definition(shape, group_size, activation, gated):
  dy, x, options = inputs(shape, gated, group_size, least=-2.0)
  how = dict(activation=activation)
  actual, (parts, scale) = both("activation_input", x, **options, **how)
  assert_same_input(actual, (parts, scale))
  how |= dict(scale=scale * 0.8)  # Some values beyond qmax.
  for layout in ("rows", "columns", "both"):
    assert_same_operand(*both("activation_fwd", parts, layout=layout, **how))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[0], expected[0], SCALES_APART[activation])
  assert_same_operand(actual[1], expected[1])


@SHAPES
def test_kernel_sums_the_gradient_over_rows(shape, group_size):
  dy, x, options = inputs((2, shape[0] // 2, shape[1]), False, group_size)
  how = dict(activation="silu")
  _, (parts, scale) = both("activation_input", x, **options, **how)
  how |= dict(scale=scale, has_sums=True)
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  # Sums of 80 terms of f32.
  assert_close(actual[2], expected[2], 2e-6)
  assert actual[0].rows.shape == x.shape


@pytest.mark.parametrize("in_up", [True, False])
def test_gated_kernels_of_nan(in_up):
  _, x, options = inputs((32, 128), True, dtype=F32)
  groups = np.stack(list(cases.nonfinite_groups(16).values()))
  at = 128 if in_up else 0
  x = x.at[: len(groups), at : at + 16].set(groups)
  how = dict(activation="silu")
  actual, (parts, scale) = both("activation_input", x, **options, **how)
  for a, e in zip(actual[0], parts, strict=True):
    assert_same_groups(a, e)
  assert np.isnan(actual[1]) and np.isnan(scale)
  # With a scale of 1 what is finite stays so beside what is not.
  how |= dict(scale=jnp.float32(1))
  assert_same_operand(*both("activation_fwd", parts, layout="both", **how))
  dy = jnp.ones((32, 128))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[1], expected[1])
  assert np.isnan(actual[0].scale) and np.isnan(expected[0].scale)


def test_activation_kernels_refuse():
  x = jnp.zeros((32, 192), BF16)
  how = dict(groups=Groups(16))
  with refused(r"tiles of 32 x 128, got a matrix \[32, 96\]"):
    kernels.activation_input(x, activation="silu", gated=True, **how)
  with refused("cannot lower erf"):
    kernels.activation_input(x, activation="gelu", gated=False, **how)
  parts = (ops.quantize_groups(x[:16, :48], **how),)
  how = dict(activation="silu", scale=jnp.float32(1))
  with refused("least 1024 values, got 768"):
    kernels.activation_fwd(parts, **how)
  parts = (ops.quantize_groups(x[:16], groups=Groups(16)),)
  with refused(r"got a matrix \[16, 192\]"):
    kernels.activation_fwd(parts, layout="columns", **how)
  with refused(r"got a matrix \[16, 192\]"):
    kernels.activation_bwd_operands(x[:16], parts, **how)


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


def check_kernels(shape, group_size, activation, gated, dtype, apart):
  """Compares kernels, not interpreted, with their definitions."""
  dy, x, options = inputs(shape, gated, group_size, dtype)

  def on_both(name, *args, **options):
    options["activation"] = activation
    kernel = getattr(kernels, name)(*args, **options)
    return kernel, run(
      getattr(ops, name).definition, *args, jit=jax.jit, **options
    )

  actual, (parts, scale) = on_both("activation_input", x, **options)
  for a, e in zip(actual[0], parts, strict=True):
    # Ties are common among bfloat16 values, and quotients off by a last bit.
    assert_same_codes(a.qvalue, e.qvalue, SHARE)
    np.testing.assert_array_equal(a.scale.astype(F32), e.scale.astype(F32))
  np.testing.assert_allclose(actual[1], scale, rtol=apart)
  for layout in ("rows", "columns", "both"):
    options = dict(scale=scale, layout=layout)
    assert_near(*on_both("activation_fwd", parts, **options))
  options = dict(scale=scale, has_sums=not gated)
  actual, expected = on_both("activation_bwd_operands", dy, parts, **options)
  for a, e in zip(actual[:2], expected[:2], strict=True):
    assert_near(a, e)
  if not gated:
    # A sum in f32 is off by less than 2^-14 of all that it adds up.
    limit = 2**-14 * np.sum(np.abs(np.asarray(dy, np.float64)), axis=0)
    assert np.all(np.abs(actual[2] - expected[2]) <= limit)
