# SPDX-License-Identifier: Apache-2.0
"""Tests the limits of number formats, and casts to them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics import formats, qtensor
from tests import oracles

DTYPES = [formats.E4M3, formats.E5M2]


@pytest.mark.parametrize(
  "dtype, qmax, subnormal",
  [
    (formats.E4M3, 448, 2**-9),
    (formats.E5M2, 57344, 2**-16),
    (formats.INT8, 127, 1),
  ],
)
def test_formats_have_the_expected_limits(dtype, qmax, subnormal):
  assert formats.qmax(dtype) == qmax
  assert formats.neighbours(jnp.float32(0), dtype)[1] == subnormal


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_of_every_bfloat16_matches_ml_dtypes(dtype):
  x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  x = x.astype(np.float32)
  got = np.asarray(jax.jit(formats.saturating_cast, static_argnums=1)(x, dtype))
  limit = formats.qmax(dtype)
  nan = np.isnan(x)
  want = np.clip(np.where(nan, 0, x), -limit, limit).astype(dtype)
  assert np.all(np.isnan(got[nan].astype(np.float32)))
  np.testing.assert_array_equal(
    got[~nan].view(np.uint8), want[~nan].view(np.uint8)
  )
  infinite = got[np.isinf(x)].astype(np.float32)
  np.testing.assert_array_equal(np.abs(infinite), limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_rounds_to_nearest_even_around_every_midpoint(dtype):
  # A cast via float16 or bfloat16 would round values near a midpoint twice.
  values = oracles.fp8_values(dtype)
  midpoints = ((values[1:] + values[:-1]) / 2).astype(np.float32)
  x = np.concatenate(
    [
      midpoints,
      np.nextafter(midpoints, np.float32(0)),
      np.nextafter(midpoints, np.float32(np.inf)),
      values.astype(np.float32),
    ]
  )
  x = np.concatenate([x, -x])
  want = oracles.fp8_cast(x, dtype)
  for cast in (
    formats.saturating_cast,
    jax.jit(formats.saturating_cast, static_argnums=1),
  ):
    got = np.asarray(cast(jnp.asarray(x), dtype)).view(np.uint8)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_table_agrees_with_ml_dtypes(dtype):
  x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
  x = np.clip(x * np.logspace(-6, 6, 4096), -448, 448).astype(np.float32)
  want = x.astype(dtype).view(np.uint8)
  np.testing.assert_array_equal(oracles.fp8_cast(x, dtype), want)


def test_cast_of_bfloat16_and_float16_inputs_saturates():
  for dtype in (jnp.bfloat16, jnp.float16):
    x = jnp.asarray([465, -1000, 3, 0.1], dtype)
    got = formats.saturating_cast(x, formats.E4M3).astype(jnp.float32)
    np.testing.assert_array_equal(got, [448, -448, 3, 0.1015625])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_enclose_every_value(dtype):
  values = oracles.fp8_values(dtype).astype(np.float32)
  values = np.unique(values[(values >= 0) & np.isfinite(values)])
  between = (values[1:] + values[:-1]) / 2
  x = np.concatenate(
    [values, between, np.nextafter(values[1:], np.float32(0)), [np.nan]]
  ).astype(np.float32)
  lower, upper = jax.jit(formats.neighbours, static_argnums=1)(x, dtype)
  place = np.searchsorted(values, x[:-1], side="right") - 1
  np.testing.assert_array_equal(lower[:-1], values[place])
  above = values[np.minimum(place + 1, len(values) - 1)]
  np.testing.assert_array_equal(upper[:-1], above)
  assert np.isnan(lower[-1]) and np.isnan(upper[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_rounds_before_it_converts(dtype):
  # XLA may drop a conversion f32 -> FP8 -> f32. This changes nothing if values
  # are rounded to the format before the conversion.
  x = jnp.asarray(np.random.default_rng(0).normal(size=4096) * 100, jnp.float32)
  jaxpr = jax.make_jaxpr(lambda x: formats.saturating_cast(x, dtype))(x)
  *before, last = jaxpr.eqns
  assert last.primitive.name == "convert_element_type"
  rounded = jax.core.eval_jaxpr(
    jaxpr.jaxpr.replace(eqns=before, outvars=last.invars), jaxpr.consts, x
  )[0]
  want = formats.saturating_cast(x, dtype).astype(jnp.float32)
  np.testing.assert_array_equal(rounded, want)


def test_cast_to_an_unsupported_format_is_refused():
  with pytest.raises(ValueError, match="one of float8_e4m3fn.*got float16"):
    formats.saturating_cast(jnp.ones(2), jnp.float16)


def test_int8_cast_rounds_to_nearest_even_and_saturates():
  x = jnp.asarray([0.5, 1.5, -2.5, 126.6, 1e9, -jnp.inf, jnp.nan])
  got = formats.saturating_cast(x, formats.INT8)
  assert got.dtype == jnp.int8
  np.testing.assert_array_equal(got, [0, 2, -2, 127, 127, -127, 0])
  x = jnp.asarray([0.0, 2.0, 2.5, 127.0])
  lower, upper = formats.neighbours(x, formats.INT8)
  np.testing.assert_array_equal(lower, [0, 2, 2, 127])
  np.testing.assert_array_equal(upper, [1, 3, 3, 127])


def test_int8_groups_are_off_by_at_most_half_a_step():
  x = jnp.float32(np.random.default_rng(0).normal(size=(3, 40)))
  x = x.at[1, 3].set(jnp.nan)
  q = qtensor.quantize(x, group_size=16, dtype=formats.INT8)
  values = q.dequantize()
  step = jnp.repeat(q.scale, 16, axis=-1)[:, :40]
  is_nan = np.zeros((3, 40), bool)
  is_nan[1, :16] = True
  np.testing.assert_array_equal(np.isnan(values), is_nan)
  error = np.abs(values - x)[~is_nan]
  assert np.all(error <= 0.5001 * step[~is_nan])


def test_int8_matmuls_sum_codes_exactly():
  rng = np.random.default_rng(0)
  x, w = (jnp.float32(rng.normal(size=s)) for s in ((32, 2048), (2048, 16)))
  how = dict(scaling=ops.PerTensor(formats.INT8), layout="both")
  x, w = ops.quantize_tensor(x, **how), ops.quantize_tensor(w, **how)
  y = ops.linear_fwd(x, w, dtype=jnp.float32)
  exact = np.asarray(x.rows, np.int64) @ np.asarray(w.rows, np.int64)
  # Sums above 2^24 are rounded to f32, and so is the product with the scale.
  np.testing.assert_allclose(y, exact * float(x.scale * w.scale), rtol=2e-7)
  said = ops.explain(ops.linear_fwd, x, w)
  why = "this cuBLASLt call multiplies only FP8 operands, got int8"
  assert f"xla everywhere (linear_fwd: {why}" in said


@pytest.mark.parametrize("op", [ops.quantize_tensor, ops.tensor_scale])
def test_kernels_refuse_int8(op):
  said = ops.explain(
    op, jnp.ones((32, 64)), scaling=ops.PerTensor(formats.INT8)
  )
  assert "float8_e4m3fn and float8_e5m2, got int8" in said
