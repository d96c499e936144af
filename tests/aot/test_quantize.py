# SPDX-License-Identifier: Apache-2.0
"""Counts the kernels that quantization launches on an H200."""

import functools

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.scaling import VALUES
from coat_jax.ops import Groups, PerTensor, quantize_rows
from coat_jax.pallas.mosaic import quantize, scales
from tests.aot.compiling import compile_for_h200, launches

pytestmark = pytest.mark.aot

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize("shape", [(8192, 4096), (100, 688)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "fn",
  [
    functools.partial(quantize.quantize_groups, groups=Groups(16)),
    functools.partial(quantize.quantize_tensor, scaling=PerTensor(E5M2)),
    functools.partial(quantize.quantize_tensor, layout="columns"),
    functools.partial(quantize.quantize_tensor, layout="both"),
  ],
  ids=["groups", "rows", "columns", "both"],
)
def test_quantization_is_one_kernel(fn, dtype, shape):
  if fn.keywords.get("layout", "rows") != "rows":
    shape = (shape[0] // 16 * 16, shape[1])
  x = jax.ShapeDtypeStruct(shape, dtype)
  if fn.func is quantize.quantize_groups:
    compiled = compile_for_h200(fn, x)
  else:
    compiled = compile_for_h200(
      lambda x, scale: fn(x, scale=scale)[:2],
      x,
      jax.ShapeDtypeStruct((), F32),
    )
  assert launches(compiled) == ["custom-call"]


@pytest.mark.parametrize("maxima", [128, 4096, 43 * 1024, 2**16 + 1])
def test_scale_of_maxima_is_one_kernel(maxima):
  bits = jax.ShapeDtypeStruct((maxima,), jnp.int32)
  compiled = compile_for_h200(
    lambda bits: scales.bits_to_scale(bits, VALUES, False), bits
  )
  assert launches(compiled) == ["custom-call"]


def test_scale_of_a_tensor_is_two_kernels():
  x = jax.ShapeDtypeStruct((8192, 4096), BF16)
  compiled = compile_for_h200(quantize.tensor_scale, x)
  assert launches(compiled) == ["custom-call"] * 2


def test_a_cast_back_does_not_undo_the_rounding():
  def rounded(x, scale):
    return quantize_rows(x, scale=scale).astype(F32) * scale

  specs = jax.ShapeDtypeStruct((512, 512), BF16), jax.ShapeDtypeStruct((), F32)
  assert "f8e4m3fn[512,512]" in compile_for_h200(rounded, *specs).as_text()
