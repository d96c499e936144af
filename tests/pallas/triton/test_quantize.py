# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's quantization with its definition, bit for bit.

A scale is a product, rounded in integers, and a code a quotient and a cast: the
interpreter does the same arithmetic as the definition. On a GPU both divide in
the same way too, but XLA may choose another one, so there we require only that
most codes are equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.ops import Groups, PerTensor
from coat_jax.pallas.triton import quantize
from coat_jax.pallas.triton.matrix import Tile
from coat_jax.pallas.triton.quantize import Flat
from tests import cases
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  assert_same_operand,
  refused,
  with_tile,
)

BF16, F32 = jnp.bfloat16, jnp.float32


def awkward(n: int) -> np.ndarray:
  """Makes rows of degenerate and of nonfinite groups, one group each."""
  return np.stack(
    list((cases.finite_groups(n) | cases.nonfinite_groups(n)).values())
  )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "x, group_size, size",
  [
    (cases.activations((100, 48)), 16, 1024),
    (cases.activations((5, 384)), 128, 512),
    (awkward(48), 16, 256),
    (awkward(64), 64, 256),
  ],
  ids=["100x48", "5x384", "awkward16", "awkward64"],
)
def test_groups_kernel_matches_definition(
  x, group_size, size, dtype, monkeypatch
):
  # Neither one tile nor a whole number of tiles, but for the power of two.
  x = jnp.asarray(x, dtype)
  groups, kernel = Groups(group_size), quantize.quantize_groups
  kernel = with_tile(monkeypatch, kernel, "pick_flat", Flat(size, 1))
  assert_same_groups(
    kernel(x, groups=groups, interpret=True),
    ops.quantize_groups.definition(x, groups=groups),
  )


def test_groups_kernel_gives_nan_of_any_bits_a_nan_scale():
  # A GPU's NaN is 0x7FFFFFFF: rounding that up to BF16 would give -0.
  x = cases.activations((4, 16))
  bits = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32)
  x[:3, 5] = bits.view(np.float32)
  actual = quantize.quantize_groups(
    jnp.asarray(x), groups=Groups(16), interpret=True
  )
  scale = np.asarray(actual.scale, np.float32)[:, 0]
  np.testing.assert_array_equal(np.isnan(scale), [True, True, True, False])


def test_groups_kernel_in_e5m2_matches_definition():
  x = jnp.asarray(awkward(64))
  args = dict(groups=Groups(32, E5M2))
  actual = quantize.quantize_groups(x, **args, interpret=True)
  assert_same_groups(actual, ops.quantize_groups.definition(x, **args))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "x",
  [
    awkward(48)[:-3],
    awkward(48),
    np.zeros((3, 16), np.float32),
  ],
  ids=["finite", "not_finite", "zeros"],
)
def test_tensor_scale_kernel_matches_definition(x, dtype, monkeypatch):
  x = jnp.asarray(x, dtype)
  find = with_tile(monkeypatch, quantize.maxima, "pick_amax", Flat(512, 1))
  bits = find(x, True)
  amax = jax.lax.bitcast_convert_type(jnp.max(bits), F32)
  # Only the maximum is the kernel's.
  expected = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))
  if np.isnan(np.asarray(x, np.float32)).any():
    assert np.isnan(amax)
  else:
    assert float(amax) == float(expected.astype(F32))
  np.testing.assert_array_equal(
    quantize.tensor_scale(x, scaling=PerTensor(E5M2), interpret=True),
    ops.tensor_scale.definition(x, scaling=PerTensor(E5M2)),
  )


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("shape", [(48, 80), (64, 32), (16, 688)], ids=str)
def test_operand_kernel_of_tiles_over_both_edges(shape, down, monkeypatch):
  # Values beyond qmax, infinities and NaN under a scale that is given.
  x = cases.activations(shape)
  x[1, ::3], x[-1, 5], x[3, -1] = np.inf, np.nan, -np.inf
  x, scale = jnp.asarray(x), jnp.float32(0.01)
  options = dict(scale=scale, scaling=PerTensor(E5M2), layout="both")
  tile = Tile(32, 64, 1, down)
  kernel = with_tile(monkeypatch, quantize.quantize_tensor, "pick_tile", tile)
  assert_same_operand(
    kernel(x, **options, interpret=True),
    ops.quantize_tensor.definition(x, **options),
  )


def test_operand_kernel_with_a_small_scale_saturates():
  x = jnp.asarray(awkward(48))
  scale = jnp.float32(1e-3)
  assert_same_operand(
    quantize.quantize_tensor(x, scale=scale, interpret=True),
    ops.quantize_tensor.definition(x, scale=scale),
  )


@pytest.mark.parametrize(
  "kernel, reason",
  [
    (
      lambda x: quantize.quantize_groups(x, groups=Groups(8)),
      r"groups of \(16, 32, 64, 128\), got 8",
    ),
    (
      lambda x: quantize.quantize_groups(x, groups=Groups(32)),
      "multiple of the group size 32 .* got 48",
    ),
    (
      lambda x: quantize.quantize_groups(
        x.astype(jnp.float16), groups=Groups(16)
      ),
      "float16",
    ),
    (lambda x: quantize.quantize_tensor(x[:, :40]), "multiple of 16 .* got"),
    (
      lambda x: quantize.quantize_tensor(x[:3], layout="columns"),
      "multiple of 16 rows, got 3",
    ),
    (lambda x: quantize.tensor_scale(x[:0]), "no axis empty"),
    (lambda x: quantize.tensor_scale(x[0, 0]), r"got \(\)"),
  ],
)
def test_quantize_kernels_refuse(kernel, reason):
  with refused(reason):
    kernel(jnp.zeros((32, 48)))


def test_quantize_kernel_refuses_what_int32_cannot_index():
  x = jax.ShapeDtypeStruct((2**16, 2**15), BF16)
  with refused("int32"):
    jax.eval_shape(quantize.tensor_scale, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(4096, 4096), (1008, 1376)], ids=str)
def test_quantize_kernels_on_a_gpu(shape, dtype):
  x = cases.activations(shape)
  x[: len(awkward(48)), :48] = awkward(48)
  scale = jnp.float32(0.01)
  given = quantize.quantize_tensor(jnp.asarray(x), scale=scale)
  # NaN, infinities, values beyond qmax.
  expected = jax.jit(ops.quantize_tensor.definition)(
    jnp.asarray(x), scale=scale
  )
  assert_same_operand(given, expected, 0.9999)
  x = jnp.asarray(x, dtype)
  for group_size in (16, 32):
    actual = quantize.quantize_groups(x, groups=Groups(group_size))
    expected = jax.jit(
      ops.quantize_groups.definition, static_argnames="groups"
    )(x, groups=Groups(group_size))
    np.testing.assert_array_equal(
      np.asarray(actual.scale, np.float32),
      np.asarray(expected.scale, np.float32),
    )
    # Ties between two codes, where the quotient is off by its last bit.
    assert_same_codes(actual.qvalue, expected.qvalue, 0.9999)
  x = jnp.asarray(cases.activations(shape), dtype)
  actual = quantize.quantize_tensor(x, scaling=PerTensor(E5M2), layout="both")
  expected = jax.jit(
    functools.partial(
      ops.quantize_tensor.definition, scaling=PerTensor(E5M2), layout="both"
    )
  )(x)
  assert_same_operand(actual, expected, 0.9999)
