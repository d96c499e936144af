# SPDX-License-Identifier: Apache-2.0
"""Triton's residual add against the definition's: everything is exact."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.ops import definitions as definition
from coat_jax.pallas.triton import residual_add
from tests import cases
from tests.comparing import assert_same_bits, jit
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  assert_same_operand,
  code_bits,
  lowered_for_h200,
)

BF16, F32 = jnp.bfloat16, jnp.float32


def both(name, *args, jit=jit, interpret=True, **options):
  """What the kernel gives and what the definition does."""
  kernel = getattr(residual_add, name)
  kernel = functools.partial(kernel, interpret=interpret, **options)
  expected = functools.partial(getattr(definition, name), **options)
  return jit(kernel)(*args), jit(expected)(*args)


def inputs(shape, *dtypes):
  return [
    jnp.asarray(cases.activations(shape, seed), dtype)
    for seed, dtype in enumerate(dtypes)
  ]


@pytest.mark.parametrize(
  "shape, dtypes, group_size",
  [
    ((3, 16), (BF16, BF16), 16),
    ((100, 48), (F32, BF16), 16),
    ((2, 3, 176), (BF16, F32), 16),
    ((5, 1376), (F32, F32), 32),
    ((4, 256), (BF16, BF16), 128),
  ],
  ids=["3x16", "100x48", "2x3x176", "5x1376", "4x256"],
)
def test_forward_is_the_definitions(shape, dtypes, group_size):
  x, y = inputs(shape, *dtypes)
  actual, expected = both("residual_add_fwd", x, y, group_size=group_size)
  assert_same_bits(actual[0], expected[0])
  assert_same_groups(actual[1], expected[1])


@pytest.mark.parametrize(
  "shape, dtypes",
  [
    ((48, 176), (BF16, BF16)),
    ((2, 40, 48), (F32, BF16)),
    ((80, 384), (BF16, F32)),
  ],
  ids=["48x176", "2x40x48", "80x384"],
)
def test_backward_is_the_definitions(shape, dtypes):
  actual, expected = both("residual_add_bwd", *inputs(shape, *dtypes))
  assert_same_bits(actual[0], expected[0])
  assert_same_operand(actual[1], expected[1])


def test_codes_are_of_the_sum_before_it_is_rounded():
  # 1 + 2^-8 is halfway between two bfloat16 and becomes 1.
  x, y = jnp.ones((16, 16), BF16), jnp.full((16, 16), 2.0**-8, BF16)
  total, operand = residual_add.residual_add_bwd(x, y, interpret=True)
  assert np.all(np.asarray(total, np.float32) == 1)
  np.testing.assert_array_equal(
    operand.scale, np.float32(1 + 2**-8) * np.float32(1 / 57344)
  )


def test_degenerate_groups():
  groups = cases.finite_groups(48) | cases.nonfinite_groups(48)
  x = np.stack(list(groups.values()))
  zeros = jnp.zeros_like(x)
  actual, expected = both("residual_add_fwd", x, zeros, group_size=16)
  assert_same_groups(actual[1], expected[1])
  np.testing.assert_array_equal(actual[0], expected[0])


@pytest.mark.parametrize("name", ["outlier", "subnormal", "inf", "nan"])
def test_backward_of_degenerate_groups(name):
  groups = cases.finite_groups(48) | cases.nonfinite_groups(48)
  g = jnp.asarray(np.tile(groups[name], (16, 1)))
  actual, expected = both("residual_add_bwd", g, jnp.zeros_like(g))
  np.testing.assert_array_equal(actual[0], expected[0])
  np.testing.assert_array_equal(actual[1].scale, expected[1].scale)
  for a, e in zip(actual[1][:2], expected[1][:2], strict=True):
    np.testing.assert_array_equal(code_bits(a), code_bits(e))


@pytest.mark.parametrize(
  "name, shapes, dtype, reason",
  [
    ("residual_add_fwd", [(16, 40)] * 2, BF16, "multiple of"),
    ("residual_add_fwd", [(16, 48), (16, 16)], BF16, "one shape"),
    ("residual_add_fwd", [(16, 48)] * 2, jnp.float16, "float16"),
    ("residual_add_bwd", [(16, 40)] * 2, BF16, "multiple of 16"),
    ("residual_add_bwd", [(17, 48)] * 2, BF16, "16 rows, got 17"),
    ("residual_add_bwd", [(16, 48), (48,)], BF16, "one shape"),
    ("residual_add_bwd", [(16, 48)] * 2, jnp.float16, "float16"),
  ],
)
def test_says_what_it_cannot_take(name, shapes, dtype, reason):
  why = getattr(residual_add, f"{name}_unsupported")
  options = {"group_size": 16} if name == "residual_add_fwd" else {}
  said = why(*(jnp.zeros(shape, dtype) for shape in shapes), **options)
  assert said is not None and re.search(reason, said)


@pytest.mark.parametrize("name", ["residual_add_fwd", "residual_add_bwd"])
def test_signatures_are_the_definitions(name):
  wanted = inspect.signature(getattr(definition, name)).parameters
  actual = dict(inspect.signature(getattr(residual_add, name)).parameters)
  del actual["interpret"]
  assert list(actual) == list(wanted)
  why = getattr(residual_add, f"{name}_unsupported")
  assert list(inspect.signature(why).parameters) == list(wanted)


@pytest.mark.parametrize("shape", [(128, 256), (48, 176)], ids=str)
def test_lowers_to_triton(shape):
  def everything(x, y):
    forward = residual_add.residual_add_fwd(x, y, group_size=16)
    return forward, residual_add.residual_add_bwd(x, y)

  x = jax.ShapeDtypeStruct(shape, BF16)
  text = lowered_for_h200(everything, x, x)
  for name in ("residual_add_fwd", "residual_add_bwd_operand"):
    assert f'"{name}' in text
  assert "triton" in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(4096, 4096), (1008, 176)], ids=str)
def test_on_a_gpu(shape, dtype):
  x, y = inputs(shape, dtype, dtype)
  on_gpu = functools.partial(both, jit=jax.jit, interpret=False)
  actual, expected = on_gpu("residual_add_fwd", x, y, group_size=16)
  assert_same_bits(actual[0], expected[0])
  # Ties are common among bfloat16 sums, and quotients off by a last bit.
  assert_same_codes(actual[1].qvalue, expected[1].qvalue, 0.999)
  assert_same_bits(actual[1].scale, expected[1].scale)
  actual, expected = on_gpu("residual_add_bwd", x, y)
  assert_same_bits(actual[0], expected[0])
  assert_same_operand(actual[1], expected[1], 0.999)
