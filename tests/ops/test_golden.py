# SPDX-License-Identifier: Apache-2.0
"""Norm, SiLU and product codes against those of the reference implementation.

Each starts from the reference's codes, or its BF16 inputs, and follows the
reference where we deliberately differ: the reference divides by the f32 scale
and stores that in BF16, rounded to nearest (we divide by the stored scale,
rounded up), and it rounds its norm and its product to BF16 before it quantizes
them (ours stay f32). So the tests compare the operations' own values. On the
CPU where these tests were written, every code was equal; the bound leaves room
for other CPUs' last bits.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics import qtensor
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from tests import golden, oracles

GROUP = 16


@pytest.fixture(scope="module")
def arrays():
  return golden.activation()


def read(codes, scales):
  """Returns the f32 values of 1 x 16 codes (bits) and their scales."""
  codes = jnp.asarray(np.asarray(codes).view(ml_dtypes.float8_e4m3fn))
  scales = jnp.asarray(scales).astype(jnp.bfloat16)
  return QTensor(codes, scales, GROUP).dequantize()


def quantize_as_the_reference(x):
  """Quantizes by f32 scales; returns bits, and scales rounded to BF16."""
  scale = qtensor.group_amax(x, GROUP) * jnp.float32(1 / 448)
  q = qtensor.quantize_with_scale(x, scale, group_size=GROUP)
  return np.asarray(q.qvalue).view(np.uint8), scale.astype(jnp.bfloat16)


def through_bfloat16(x):
  return x.astype(jnp.bfloat16).astype(jnp.float32)


def codes_with_scale(values, scale):
  q = ops.quantize_tensor(values, scale=jnp.float32(scale))
  return np.asarray(q.rows).view(np.uint8)


def assert_codes_equal(got, want, share=0.999):
  apart = oracles.codes_apart(got, want)
  assert np.mean(apart == 0) >= share
  assert np.max(apart) <= 1


def normalized(arrays, eps=1e-5):
  return ops.norm_values(
    read(arrays["qx"], arrays["sx"]),
    jnp.asarray(arrays["w"]),
    None,
    kind="rms",
    eps=eps,
  )[0]


def test_norm_codes_equal_the_reference(arrays):
  # Starts from the golden qx and sx and quantizes with the golden scale.
  y = normalized(arrays)
  got = codes_with_scale(through_bfloat16(y), arrays["norm_s"])
  assert_codes_equal(got, arrays["norm_q"])
  # The BF16 step is the whole difference: without it 98.0 % are equal.
  got = codes_with_scale(y, arrays["norm_s"])
  assert_codes_equal(got, arrays["norm_q"], share=0.97)
  # And the scale is amax / 448, in BF16.
  amax = jnp.max(jnp.abs(y)) / 448
  assert abs(float(amax) / arrays["norm_s"] - 1) < 2**-8


def test_silu_codes_equal_the_reference(arrays):
  gate = read(*quantize_as_the_reference(jnp.asarray(arrays["g"])))
  silu = ops.activation_values(gate, activation="silu")
  codes, scales = quantize_as_the_reference(silu)
  assert_codes_equal(codes, arrays["silu_q"])
  assert np.mean(np.float32(scales) == arrays["silu_s"]) >= 0.999


def test_product_codes_equal_the_reference(arrays):
  silu = read(arrays["silu_q"], arrays["silu_s"])
  up = read(*quantize_as_the_reference(jnp.asarray(arrays["u"])))
  got = codes_with_scale(through_bfloat16(silu * up), arrays["mul_s"])
  assert_codes_equal(got, arrays["mul_q"])
  # Without the BF16 step 98.5 % are equal.
  got = codes_with_scale(silu * up, arrays["mul_s"])
  assert_codes_equal(got, arrays["mul_q"], share=0.98)


def test_our_own_operations_lose_no_more_than_the_reference(arrays):
  # Ours as they are: other scales, so other codes. What both stand for is
  # compared with the unquantized product of the BF16 inputs: ours (stored
  # scales rounded up, divided by) are as near to it.
  gate, up = jnp.asarray(arrays["g"]), jnp.asarray(arrays["u"])
  exact = ops.activation_values(gate, activation="silu") * up
  how, groups = dict(activation="silu"), Groups(GROUP)
  parts, scale = ops.activation_input(
    jnp.concatenate([gate, up], axis=-1), gated=True, groups=groups, **how
  )
  gate_values, up_values = (part.dequantize() for part in parts)
  silu_q = groups.quantize(ops.activation_values(gate_values, **how))
  ours = ops.PerTensor().quantize(silu_q.dequantize() * up_values)
  minimal = ops.activation_fwd(parts, scale=scale, **how)
  golden_codes = jnp.asarray(arrays["mul_q"].view(ml_dtypes.float8_e4m3fn))

  def error(codes, scale):
    values = codes.astype(jnp.float32) * scale
    return float(jnp.linalg.norm(values - exact) / jnp.linalg.norm(exact))

  ours = error(ours.rows, ours.scale)
  assert ours <= 1.02 * error(golden_codes, jnp.float32(arrays["mul_s"]))
  # One quantization less.
  assert error(minimal.rows, minimal.scale) < ours


def test_norm_codes_of_a_wrong_formula_are_apart(arrays):
  got = codes_with_scale(
    through_bfloat16(normalized(arrays, eps=1e-2)), arrays["norm_s"]
  )
  with pytest.raises(AssertionError):
    assert_codes_equal(got, arrays["norm_q"])
