# SPDX-License-Identifier: Apache-2.0
"""Compares norm, SiLU and gated product with COAT's own code (the reference).

Each test starts from the reference's codes or from its BF16 inputs, and follows
the reference where our operations deliberately differ:

  - It divides by the f32 scale, and stores this scale rounded to the nearest
    BF16. We round up and divide by the stored scale.
  - It rounds norm and product to BF16 before quantizing them. Ours stay f32.

On the CPU where these tests were written, all codes were equal; the bounds
allow for rounding differences on other CPUs.
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
  """Dequantizes codes, given as bits, in groups of 16; returns f32."""
  codes = jnp.asarray(np.asarray(codes).view(ml_dtypes.float8_e4m3fn))
  scales = jnp.asarray(scales).astype(jnp.bfloat16)
  return QTensor(codes, scales, GROUP).dequantize()


def quantize_as_the_reference(x):
  """Quantizes with f32 scales; returns codes, and scales rounded to BF16."""
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


def test_norm_codes_match_the_reference(arrays):
  # Start from the reference's qx and sx, and quantize with its scale.
  y = normalized(arrays)
  got = codes_with_scale(through_bfloat16(y), arrays["norm_s"])
  assert_codes_equal(got, arrays["norm_q"])
  # Without the rounding to BF16, only 98.0 % of the codes are equal.
  got = codes_with_scale(y, arrays["norm_s"])
  assert_codes_equal(got, arrays["norm_q"], share=0.97)
  # The scale is amax / 448, in BF16.
  amax = jnp.max(jnp.abs(y)) / 448
  assert abs(float(amax) / arrays["norm_s"] - 1) < 2**-8


def test_silu_codes_match_the_reference(arrays):
  gate = read(*quantize_as_the_reference(jnp.asarray(arrays["g"])))
  silu = ops.activation_values(gate, activation="silu")
  codes, scales = quantize_as_the_reference(silu)
  assert_codes_equal(codes, arrays["silu_q"])
  assert np.mean(np.float32(scales) == arrays["silu_s"]) >= 0.999


def test_product_codes_match_the_reference(arrays):
  silu = read(arrays["silu_q"], arrays["silu_s"])
  up = read(*quantize_as_the_reference(jnp.asarray(arrays["u"])))
  got = codes_with_scale(through_bfloat16(silu * up), arrays["mul_s"])
  assert_codes_equal(got, arrays["mul_q"])
  # Without the rounding to BF16, only 98.5 % of the codes are equal.
  got = codes_with_scale(silu * up, arrays["mul_s"])
  assert_codes_equal(got, arrays["mul_q"], share=0.98)


def test_our_operations_are_as_accurate_as_the_reference(arrays):
  # Our scales differ from the reference's, and so do the codes. Compare the
  # dequantized values of both with the unquantized product of the BF16 inputs.
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
  # With residuals="minimal", the output of SiLU is not quantized.
  assert error(minimal.rows, minimal.scale) < ours


def test_norm_codes_with_a_wrong_eps_differ(arrays):
  got = codes_with_scale(
    through_bfloat16(normalized(arrays, eps=1e-2)), arrays["norm_s"]
  )
  with pytest.raises(AssertionError):
    assert_codes_equal(got, arrays["norm_q"])
