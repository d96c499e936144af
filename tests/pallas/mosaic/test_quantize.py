# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's quantization with its definition, bit for bit.

Kernel and definition round the quotient correctly. On a GPU, XLA may round it
differently, so only most codes must be equal there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops import Groups, PerTensor
from coat_jax.pallas.mosaic import quantize, scales
from tests import cases
from tests.pallas.kernels import (
  assert_same_groups,
  assert_same_operand,
  refused,
)

BF16, F32 = jnp.bfloat16, jnp.float32


def awkward(n: int) -> np.ndarray:
  """Makes one row for each degenerate or nonfinite group."""
  return np.stack(
    list((cases.finite_groups(n) | cases.nonfinite_groups(n)).values())
  )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "x, group_size",
  [
    (cases.activations((100, 48)), 16),
    (cases.activations((5, 384)), 128),
    (np.tile(awkward(48), (3, 1)), 16),
    (np.tile(awkward(64), (3, 1)), 64),
  ],
  ids=["100x48", "5x384", "awkward16", "awkward64"],
)
def test_groups_kernel_matches_definition(x, group_size, dtype):
  # The last program overlaps the one before it.
  x, groups = jnp.asarray(x, dtype), Groups(group_size)
  assert x.size % 1024
  assert_same_groups(
    quantize.quantize_groups(x, groups=groups, interpret=True),
    ops.quantize_groups.definition(x, groups=groups),
  )


def test_groups_kernel_turns_any_nan_into_a_nan_scale():
  # A GPU's NaN is 0x7FFFFFFF. Rounding these bits up to BF16 would give -0.
  x = cases.activations((64, 16))
  bits = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32)
  x[:3, 5] = bits.view(np.float32)
  actual = quantize.quantize_groups(
    jnp.asarray(x), groups=Groups(16), interpret=True
  )
  scale = np.asarray(actual.scale, np.float32)[:, 0]
  np.testing.assert_array_equal(np.isnan(scale), np.arange(64) < 3)


def test_groups_kernel_in_e5m2_matches_definition():
  x = jnp.asarray(np.tile(awkward(64), (3, 1)))
  args = dict(groups=Groups(32, E5M2))
  actual = quantize.quantize_groups(x, **args, interpret=True)
  assert_same_groups(actual, ops.quantize_groups.definition(x, **args))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("last", [-3, None], ids=["finite", "not_finite"])
def test_tensor_scale_kernel_matches_definition(last, dtype):
  x = jnp.asarray(np.tile(awkward(48)[:last], (1, 9)), dtype)
  options = dict(scaling=PerTensor(E5M2))
  actual = quantize.tensor_scale(x, **options, interpret=True)
  expected = ops.tensor_scale.definition(x, **options)
  assert np.isfinite(actual) == (last is not None)
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("largest", [0, 130, 8192, 20000])
def test_scale_reads_all_maxima(largest):
  count = largest + 1
  shape = scales.maxima(count)
  bits = np.arange(count, dtype=np.int32)[:, None] + np.zeros(shape.shape, "i4")
  bits = jnp.asarray(bits + 0x3F000000)
  actual = scales.bits_to_scale(bits, PerTensor(E4M3), True)
  amax = jax.lax.bitcast_convert_type(jnp.int32(0x3F000000 + largest), F32)
  np.testing.assert_array_equal(actual, amax * np.float32(1 / 448))


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("shape", [(48, 144), (80, 128), (32, 688)], ids=str)
def test_operand_kernel_with_a_given_scale_matches_definition(shape, layout):
  # Include values beyond qmax, infinities and NaN.
  x = cases.activations(shape)
  x[1, ::3], x[-1, 5], x[3, -1] = np.inf, np.nan, -np.inf
  x, scale = jnp.asarray(x), jnp.float32(0.01)
  options = dict(scale=scale, scaling=PerTensor(E5M2), layout=layout)
  assert_same_operand(
    quantize.quantize_tensor(x, **options, interpret=True),
    ops.quantize_tensor.definition(x, **options),
  )


def test_operand_kernel_with_a_small_scale_saturates():
  x = jnp.asarray(np.tile(awkward(48), (3, 1)))
  scale = jnp.float32(1e-3)
  assert_same_operand(
    quantize.quantize_tensor(x, scale=scale, interpret=True),
    ops.quantize_tensor.definition(x, scale=scale),
  )


def test_operand_kernel_finds_the_scale_and_keeps_the_shape():
  x = jnp.asarray(cases.activations((96, 256)).reshape(2, 48, 256), BF16)
  assert_same_operand(
    quantize.quantize_tensor(x, layout="both", interpret=True),
    ops.quantize_tensor.definition(x, layout="both"),
  )


@pytest.mark.parametrize(
  "kernel, reason",
  [
    (
      lambda x: quantize.quantize_groups(x, groups=Groups(32)),
      "multiple of the group size 32, got 48",
    ),
    (
      lambda x: quantize.quantize_groups(x, groups=Groups(8)),
      r"group sizes 16, 32, 64, 128, got 8",
    ),
    (
      lambda x: quantize.quantize_groups(
        x.astype(jnp.float16), groups=Groups(16)
      ),
      "float16",
    ),
    (lambda x: quantize.quantize_tensor(x[:, :40]), "multiple of 16, .* got"),
    (
      lambda x: quantize.quantize_tensor(x[:3], layout="columns"),
      "rows is a multiple of 16, got 3",
    ),
    (lambda x: quantize.tensor_scale(x[:0]), "no empty axis"),
    (lambda x: quantize.tensor_scale(x[0, 0]), r"got shape \(\)"),
    (lambda x: quantize.quantize_tensor(x[:16]), "least 1024 values, got 768"),
    (
      lambda x: quantize.quantize_tensor(x, layout="columns"),
      r"at least 32 x 128, got \[32, 48\]",
    ),
  ],
)
def test_quantize_kernels_refuse_unsupported_arguments(kernel, reason):
  with refused(reason):
    kernel(jnp.zeros((32, 48)))


def test_quantize_kernel_refuses_arrays_that_int32_cannot_index():
  x = jax.ShapeDtypeStruct((2**16, 2**15), BF16)
  with refused("int32"):
    jax.eval_shape(quantize.tensor_scale, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(4096, 4096), (1008, 1376)], ids=str)
def test_quantize_kernels_on_a_gpu(shape, dtype):
  check_kernels(shape, dtype, 0.9999)


def check_kernels(shape, dtype, share):
  """Compares compiled kernels with their definitions."""
  x = cases.activations(shape)
  x[: len(awkward(48)), :48] = awkward(48)
  # Replace subnormals by zeros, as XLA does on a CPU.
  x = jnp.asarray(np.where(np.abs(x) < 2.0**-126, 0, x), dtype)
  scaling = PerTensor(E5M2)
  amax = float(jnp.max(jnp.abs(x[len(awkward(48)) :].astype(F32))))
  np.testing.assert_array_equal(
    quantize.tensor_scale(x[len(awkward(48)) :], scaling=scaling),
    np.float32(amax) * np.float32(1 / 57344),
  )
  for layout in ("rows", "columns", "both"):
    options = dict(scaling=scaling, layout=layout)
    run = functools.partial(ops.quantize_tensor.definition, **options)
    finite = jnp.where(jnp.isfinite(x), x, 0)
    for values, scale in ((x, jnp.float32(0.01)), (finite, None)):
      assert_same_operand(
        quantize.quantize_tensor(values, scale=scale, **options),
        jax.jit(run)(values, scale=scale),
        share,
      )
  for group_size in (16, 16 if shape[-1] % 128 else 128):
    how = dict(groups=Groups(group_size))
    expected = jax.jit(
      functools.partial(ops.quantize_groups.definition, **how)
    )(x)
    actual = quantize.quantize_groups(x, **how)
    assert_same_groups(actual, expected, share)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.01, 0.013, 0.3, 1.7e-5])
def test_quotients_halfway_between_codes_on_a_gpu(scale):
  check_ties(scale)


def check_ties(scale):
  """Compares codes of quotients that are ties only if rounded correctly."""
  codes = np.arange(0x08, 0x7E, dtype=np.uint8).view(E4M3).astype(np.float32)
  ties = (codes[1:] + codes[:-1]) / 2
  x = np.resize(ties * np.float32(scale), (16, 128))
  expected = np.float32(x / np.float32(scale)).astype(E4M3)
  actual = quantize.quantize_tensor(jnp.asarray(x), scale=jnp.float32(scale))
  np.testing.assert_array_equal(
    np.asarray(actual.rows).view(np.uint8), expected.view(np.uint8)
  )
