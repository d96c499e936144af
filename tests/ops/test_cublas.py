# SPDX-License-Identifier: Apache-2.0
"""Tests the bias and residual that cuBLASLt adds to an FP8 matmul, on a GPU."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import ops
from tests.comparing import assert_close

pytestmark = pytest.mark.gpu


# Sizes of Llama-2-7B and SigLIP. 4304 is a multiple of 16, but not of 32.
@pytest.mark.parametrize("d, f", [(4096, 11008), (1152, 4304), (4304, 1152)])
@pytest.mark.parametrize("has_add", [False, True])
@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_bias_and_residual_are_added(d, f, has_add, bias_dtype):
  x, w, bias, add = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate([(8, 162, d), (d, f), (f,), (8, 162, f)])
  )
  x = ops.quantize_tensor(x, layout="rows")
  w = ops.quantize_tensor(w, layout="columns")
  # Bias and residual are as large as the matmul's result.
  options = dict(bias=(bias * d**0.5).astype(bias_dtype))
  if has_add:
    options["add"] = (add * d**0.5).astype(jnp.bfloat16)
  out = jax.jit(
    lambda x, w, options: ops.linear_fwd(
      x, w, implementation="cublas", **options
    )
  )(x, w, options)
  expected = jax.jit(
    lambda x, w, options: ops.linear_fwd.definition(
      x, w, dtype=jnp.float32, **options
    )
  )(x, w, options)
  # The result is rounded to BF16, and so is an f32 bias before it is added.
  assert_close(out, expected, 2.0**-7)
