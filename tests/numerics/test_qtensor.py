# SPDX-License-Identifier: Apache-2.0
"""Compares quantization with NumPy, error bounds, and COAT's code."""

import dataclasses
import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from coat_jax.numerics import qtensor
from coat_jax.numerics.formats import E4M3, E5M2
from tests import cases, golden, oracles

DTYPES = [E4M3, E5M2]
SCALE_DTYPES = [jnp.float32, jnp.bfloat16]


@functools.partial(jax.jit, static_argnames=("group_size", "dtype", "scale"))
def quantize(x, *, group_size, dtype=E4M3, scale=jnp.float32):
  q = qtensor.quantize(x, group_size=group_size, dtype=dtype, scale_dtype=scale)
  return q, q.dequantize()


def bits(x) -> np.ndarray:
  return np.asarray(x).view(np.uint8)


def error_bound(x, scale, dtype, group_size):
  """Bounds the error of quantize(x).dequantize(): half a step times the scale.

  Rounding to f32 changes quotient, product and scale by up to 2^-24 each, and
  the value by less than 2^-22. Values below 2^-126 may become zero.
  """
  scale = np.asarray(scale, np.float64)
  if group_size is not None:
    scale = np.repeat(scale, group_size, -1)[..., : x.shape[-1]]
  x = np.abs(x.astype(np.float64))
  bound = scale * oracles.fp8_error_bound(x / scale, dtype)
  return bound + x * 2.0**-22 + oracles.SMALLEST_NORMAL


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_matches_numpy_bit_for_bit(dtype, scale_dtype):
  for shape, group_size in cases.SHAPES[1:6]:
    x = cases.activations(shape)
    q, _ = quantize(x, group_size=group_size, dtype=dtype, scale=scale_dtype)
    codes, scales = oracles.quantize(x, group_size, dtype, scale_dtype)
    np.testing.assert_array_equal(bits(q.qvalue), codes)
    np.testing.assert_array_equal(np.asarray(q.scale), scales)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_quantize_of_degenerate_groups_matches_numpy(scale_dtype):
  groups = cases.finite_groups(16)
  # Some backends treat subnormals as zero, so their codes are 0 or tiny.
  names = [name for name in groups if "subnormal" not in name]
  x = np.stack([groups[name] for name in names])
  q, x_hat = quantize(x, group_size=16, scale=scale_dtype)
  codes, scales = oracles.quantize(x, 16, E4M3, scale_dtype)
  np.testing.assert_array_equal(np.asarray(q.scale), scales)
  # Ignore signs: where a quotient is flushed to zero, its sign may be lost.
  np.testing.assert_array_equal(bits(q.qvalue) & 0x7F, codes & 0x7F, str(names))
  assert np.all(np.isfinite(x_hat))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, group_size", [*cases.SHAPES, ((64, 96), None)])
def test_quantization_error_is_within_half_a_step(shape, group_size, dtype):
  x = cases.activations(shape)
  q, x_hat = quantize(x, group_size=group_size, dtype=dtype)
  assert q.qvalue.shape == shape and q.qvalue.dtype == dtype
  groups = (
    () if group_size is None else (*shape[:-1], -(-shape[-1] // group_size))
  )
  assert q.scale.shape == groups and q.scale.dtype == jnp.float32
  error = np.abs(np.asarray(x_hat, np.float64) - x)
  assert np.all(error <= error_bound(x, q.scale, dtype, group_size))


@hypothesis.given(
  x=hnp.arrays(
    np.float32,
    # All examples have one shape, so that they reuse compiled operations.
    (2, 9),
    elements=st.one_of(
      st.sampled_from([0.0, -0.0, 1.0, 2.0**-126, 1e38, -3e38]),
      st.floats(-(2.0**127), 2.0**127, width=32),
      st.floats(-(2.0**-100), 2.0**-100, width=32),
    ),
  ),
  group_size=st.sampled_from([None, 4]),
  dtype=st.sampled_from(DTYPES),
  scale_dtype=st.sampled_from(SCALE_DTYPES),
)
def test_quantization_error_of_any_finite_input_is_bounded(
  x, group_size, dtype, scale_dtype
):
  q = qtensor.quantize(
    jnp.asarray(x), group_size=group_size, dtype=dtype, scale_dtype=scale_dtype
  )
  x_hat = q.dequantize()
  assert np.all(np.isfinite(q.qvalue.astype(np.float32)))
  assert np.all(np.asarray(q.scale, np.float32) >= oracles.SMALLEST_NORMAL)
  error = np.abs(np.asarray(x_hat, np.float64) - x)
  assert np.all(error <= error_bound(x, q.scale, dtype, group_size))


@hypothesis.given(
  magnitude=st.floats(-38, 38),
  value=st.floats(1, 9),
  n=st.sampled_from([7, 33]),
  dtype=st.sampled_from(DTYPES),
)
def test_constant_groups_keep_their_value(magnitude, value, n, dtype):
  x = np.full((1, n), value * 10**magnitude if magnitude < 37 else 1e37 * value)
  x = x.astype(np.float32)
  q = qtensor.quantize(jnp.asarray(x), group_size=16, dtype=dtype)
  x_hat = np.asarray(q.dequantize())
  # The code is qmax, and the scale is rounded twice. The smallest values may
  # have a smaller code, because no scale is below 2^-126.
  tolerance = np.where(x > 2.0**-110, 2.0**-22 * x, 2.0**-4 * x + 2.0**-126)
  np.testing.assert_array_less(np.abs(x_hat - x), tolerance)


def test_bfloat16_scales_are_rounded_up():
  amax = np.random.default_rng(0).lognormal(0, 20, 4096).astype(np.float32)
  exact = np.maximum(amax * np.float32(1 / 448), np.float32(2**-126))
  got = qtensor.amax_to_scale(jnp.asarray(amax), E4M3, jnp.bfloat16)
  assert got.dtype == jnp.bfloat16
  got = np.asarray(got)
  assert np.all(got.astype(np.float32) >= exact)
  below = np.nextafter(got, np.asarray(0, got.dtype)).astype(np.float32)
  assert np.all(below < exact)
  # A scale that is already a BF16 value does not change.
  values = np.arange(1, 2, 2**-7, np.float32)
  amax = np.nextafter(values * 448, np.float32(0))
  exact = amax * np.float32(1 / 448) == values
  assert exact.any()
  got = qtensor.amax_to_scale(jnp.asarray(amax), E4M3, jnp.bfloat16)
  np.testing.assert_array_equal(got[exact], values[exact])


def test_quantize_divides_by_the_stored_scale():
  # amax / 448 = 1 + 2^-9 is stored as 1 + 2^-7. 249.5 / (1 + 2^-9) = 249.01 is
  # nearer to 256, but 249.5 / (1 + 2^-7) = 247.57 is nearer to 240.
  x = jnp.asarray([[448 * (1 + 2**-9), 249.5]], jnp.float32)
  q = qtensor.quantize(x, group_size=2, scale_dtype=jnp.bfloat16)
  assert float(q.scale[0, 0]) == 1 + 2**-7
  np.testing.assert_array_equal(q.qvalue.astype(jnp.float32), [[448, 240]])
  exact = qtensor.quantize(x, group_size=2)
  np.testing.assert_array_equal(exact.qvalue.astype(jnp.float32), [[448, 256]])


def test_zero_groups_have_the_smallest_scale_and_code_zero():
  x = jnp.zeros((2, 20)).at[0, 3].set(5.0)
  q = qtensor.quantize(x, group_size=8)
  np.testing.assert_array_equal(q.scale[1], [2.0**-126] * 3)
  np.testing.assert_array_equal(q.scale[0, 1:], [2.0**-126] * 2)
  np.testing.assert_array_equal(bits(q.qvalue[1]), 0)


def test_only_named_axes_share_a_scale():
  mesh = jax.make_mesh(
    (2, 2),
    ("stage", "data"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:4],
  )
  x = jnp.float32([[1, 2, 3, 4], [50, 60, 70, 80]])
  where = P("stage", "data")

  def on_devices(f):
    out = P(("stage", "data"))
    return jax.shard_map(f, mesh=mesh, in_specs=where, out_specs=out)

  def own(x):
    return qtensor.quantize(x, group_size=None).scale.reshape(1)

  def shared(x):
    return qtensor.tensor_amax(x, axis_names=("data",)).reshape(1)

  program = str(jax.make_jaxpr(on_devices(own))(x))
  assert "pmax" not in program and "pmax" in str(
    jax.make_jaxpr(on_devices(shared))(x)
  )
  np.testing.assert_allclose(
    on_devices(own)(x), np.float32([2, 4, 60, 80]) / 448, rtol=1e-6
  )
  np.testing.assert_array_equal(
    on_devices(lambda x: jax.lax.pcast(shared(x), "data", to="varying"))(x),
    [4, 4, 80, 80],
  )


def test_tensor_amax_is_the_largest_magnitude():
  x = jnp.asarray(cases.activations((7, 100), seed=3)).at[6, 99].set(-1e4)
  assert qtensor.tensor_amax(x) == np.float32(1e4)
  assert qtensor.tensor_amax(x.astype(jnp.bfloat16)) == jnp.bfloat16(1e4)
  assert qtensor.tensor_amax(jnp.float32(-2.5)) == 2.5
  assert qtensor.tensor_amax(jnp.zeros((0, 4))) == 0
  for nan in (jnp.nan, -jnp.nan):
    assert np.isnan(qtensor.tensor_amax(x.at[0, 0].set(nan)))


@pytest.mark.parametrize("group_size", [1, 7, 16, 33, 100])
def test_group_amax_covers_short_groups(group_size):
  x = -cases.activations((3, 100), seed=4)
  want = [
    [np.max(np.abs(g)) for g in oracles.split(row, group_size)] for row in x
  ]
  np.testing.assert_array_equal(
    qtensor.group_amax(jnp.asarray(x), group_size), want
  )
  groups = qtensor.split_groups(jnp.asarray(x), group_size)
  np.testing.assert_array_equal(qtensor.join_groups(groups, 100), x)


def test_nonfinite_value_does_not_affect_other_groups():
  x = cases.activations((3, 48))
  clean, _ = quantize(x, group_size=16)
  for name, group in cases.nonfinite_groups(16).items():
    dirty = x.copy()
    dirty[1, 16:32] = group
    q, x_hat = quantize(dirty, group_size=16)
    others = np.ones(x.shape, bool)
    others[1, 16:32] = False
    np.testing.assert_array_equal(
      bits(q.qvalue)[others], bits(clean.qvalue)[others]
    )
    assert np.all(np.isfinite(x_hat[others]))
    assert not np.isfinite(x_hat[1, 24]), name


def test_nan_makes_a_whole_per_tensor_array_nan():
  x = jnp.asarray(cases.activations((4, 33))).at[2, 5].set(jnp.nan)
  q = qtensor.quantize(x, group_size=None)
  assert np.all(np.isnan(q.dequantize()))


def test_group_codes_match_coats_implementation():
  # COAT's code divides by the f32 scale, and stores it rounded to the nearest
  # BF16. We divide by the stored scale, so compare codes for f32 scales. COAT
  # also adds 1e-10 to amax, which has no effect here (amax > 0.1). COAT divides
  # by 448, we multiply by 1/448, and COAT's GPU division may be off by an ulp.
  # So a value at a rounding boundary may get a neighbouring code.
  arrays = golden.activation()
  q, _ = quantize(arrays["x"], group_size=16)
  got, want = bits(q.qvalue), arrays["qx"]
  apart = oracles.codes_apart(got, want)
  assert np.mean(apart == 0) >= 0.999
  assert np.max(apart) <= 1
  stored = np.asarray(q.scale).astype(ml_dtypes.bfloat16).astype(np.float32)
  assert np.mean(stored == arrays["sx"]) >= 0.999


@pytest.mark.parametrize("group_size", [0, -1])
def test_group_size_below_one_is_refused(group_size):
  x = jnp.ones((2, 4))
  with pytest.raises(ValueError, match="group_size must be at least 1, got"):
    qtensor.quantize(x, group_size=group_size)


def test_scale_whose_shape_does_not_fit_the_group_size_is_refused():
  q = qtensor.quantize(jnp.ones((2, 32)), group_size=16)
  for group_size in (8, None):
    other = dataclasses.replace(q, group_size=group_size)
    with pytest.raises(ValueError, match=r"got \(2, 2\); pass the group_size"):
      other.dequantize()
  with pytest.raises(ValueError, match="quantize_with_scale: values of shape"):
    qtensor.quantize_with_scale(jnp.ones(4), jnp.ones(3), group_size=2)


def test_dequantize_returns_the_requested_dtype():
  q = qtensor.quantize(jnp.ones((2, 32)), group_size=16)
  assert q.dequantize(dtype=jnp.bfloat16).dtype == jnp.bfloat16
