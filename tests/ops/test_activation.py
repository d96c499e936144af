# SPDX-License-Identifier: Apache-2.0
"""Compares activation functions with float64 and `jax.vjp` of formulas."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import quantize
from coat_jax.numerics.scaling import PerTensor
from coat_jax.ops import Groups
from coat_jax.ops.activation import gradient_bounds
from tests import cases, oracles
from tests.comparing import assert_close, assert_same_bits
from tests.ops.test_definitions import (
  GROUP,
  ROWS,
  WIDTHS,
  assert_codes_stand_for,
  assert_nans,
  degenerate,
  gradient,
  in_groups,
  unquantized,
)


def silu64(x):
  return x / (1 + np.exp(-x))


def gelu64(x, approximate):
  if approximate == "sigmoid":
    return x / (1 + np.exp(-1.702 * x))
  if approximate:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


# For each `ops.Activation`: the formula in float64, and JAX's function.
FORMULAS = {
  "silu": silu64,
  "gelu": functools.partial(gelu64, approximate=False),
  "gelu_tanh": functools.partial(gelu64, approximate=True),
  "gelu_quick": functools.partial(gelu64, approximate="sigmoid"),
}
FUNCTIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def gelu_slope64(x):
  """Computes the derivative of GELU's tanh approximation."""
  c = (2 / np.pi) ** 0.5
  tanh = np.tanh(c * (x + 0.044715 * x**3))
  slope = c * (1 + 3 * 0.044715 * x**2)
  return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope


@jax.custom_jvp
def gelu_of_slope64(x):
  """Computes GELU; its derivative is float64, because f32 is off by 2e-6."""
  return jnp.float32(gelu64(np.asarray(x, np.float64), True))


@gelu_of_slope64.defjvp
def _gelu_jvp(primals, tangents):
  slope = gelu_slope64(np.asarray(primals[0], np.float64))
  return gelu_of_slope64(*primals), jnp.float32(slope) * tangents[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_forwards_match_float64(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  a64, b64 = np.asarray(a_values, np.float64), np.asarray(b_values, np.float64)
  gate = unquantized((ROWS, width), 1, factor=4)
  gate_up = jnp.concatenate([gate, unquantized((ROWS, width), 2)], axis=-1)
  groups = Groups(GROUP)
  for activation, formula in FORMULAS.items():
    how = dict(activation=activation)
    values = ops.activation_values(a_values, **how)
    assert_close(values, formula(a64), 1e-6)
    for x, gated, parts, want in (
      (gate, False, (a,), formula(a64)),
      (gate_up, True, (a, b), formula(a64) * b64),
    ):
      got, scale = ops.activation_input(x, gated=gated, groups=groups, **how)
      assert_same_bits(got, parts)
      q = ops.activation_fwd(parts, scale=scale, **how)
      assert_codes_stand_for(q, want)


def test_unknown_activation_is_refused():
  x = jnp.ones((1, GROUP))
  for f in (ops.activation_values, ops.activation_derivative):
    unchecked = inspect.unwrap(f)  # Users have no runtime type checks.
    with pytest.raises(ValueError, match="'gelu_quick', got 'swish'"):
      unchecked(x, activation="swish")


def test_gelu_is_close_to_float64_between_minus_5_and_5():
  # Include small results of GELU, where a slightly wrong formula would show.
  x = np.linspace(-5, 5, 1001, dtype=np.float32)
  x64 = np.float64(x)
  # The main error is that of exp(2 * u), where u is the argument of tanh: 2 * u
  # is up to 17, and a relative error of 2^-24 in it changes exp(2 * u) by 1e-6.
  values = ops.activation_values(jnp.asarray(x), activation="gelu_tanh")
  np.testing.assert_allclose(values, gelu64(x64, True), rtol=3e-6, atol=0)
  slope = ops.activation_derivative(jnp.asarray(x), activation="gelu_tanh")
  # The derivative has two terms, which cancel near -0.75.
  terms = np.abs(gelu64(x64, True) / np.where(x == 0, 1, x64))
  terms += np.abs(gelu_slope64(x64) - terms)
  assert np.all(np.abs(slope - gelu_slope64(x64)) <= 5e-6 * terms)


def test_activation_operands_use_the_given_scale():
  a, _ = in_groups((ROWS, 43), 1)
  b, _ = in_groups((ROWS, 43), 2)
  for parts in ((a,), (a, b)):
    forward = functools.partial(ops.activation_fwd, parts, activation="silu")
    q = forward(scale=jnp.float32(2**-7))
    doubled = forward(scale=jnp.float32(2**-6))
    assert float(doubled.scale) == 2 * float(q.scale)
    largest = [
      np.max(np.abs(np.asarray(x.rows, np.float32))) for x in (q, doubled)
    ]
    assert largest[0] == 2 * largest[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_bwd_matches_the_gradients(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  dy = gradient((ROWS, width))

  def oracle(f, *args):
    return jax.vjp(f, *args)[1](dy)

  for activation, f in FUNCTIONS.items():
    how = dict(activation=activation)
    assert_close(ops.activation_bwd(dy, (a,), **how), oracle(f, a_values))
    got = ops.activation_bwd(dy, (a, b), **how)
    assert_close(got, oracle(lambda x, y, f=f: f(x) * y, a_values, b_values))


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_bwd_operands_match_the_gradients_with_one_scale(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  dy = gradient((ROWS, width))
  scale = jnp.float32(1 / 64)
  # The largest |dy|, |a| and |b| in each group, as scales times 448.
  groups = math.ceil(width / GROUP)
  dy_amax = np.pad(np.abs(dy), ((0, 0), (0, groups * GROUP - width)))
  dy_amax = dy_amax.reshape(ROWS, groups, GROUP).max(axis=2)
  a_amax, b_amax = (448 * np.asarray(x.scale, np.float64) for x in (a, b))
  ungated = np.max(dy_amax * 1.13)
  gated_bound = np.max(dy_amax * np.maximum(a_amax, 1.13 * b_amax))
  # In f32, GELU's gradient is off by 2e-6 of its largest value.
  slope = gelu_slope64(np.asarray(a_values, np.float64))
  exact = np.asarray(dy, np.float64) * slope

  def gated(f):
    gradients = jax.vjp(lambda x, y: f(x) * y, a_values, b_values)[1](dy)
    return np.concatenate(gradients, axis=-1)

  for activation, parts, want in (
    ("silu", (a, b), gated(jax.nn.silu)),
    ("gelu_tanh", (a, b), gated(gelu_of_slope64)),
    ("silu", (a,), jax.vjp(jax.nn.silu, a_values)[1](dy)[0]),
    ("gelu_tanh", (a,), exact),
  ):
    how = dict(activation=activation, scale=scale)
    dx, y, sums, _ = ops.activation_bwd_operands(
      dy, parts, has_sums=True, **how
    )
    bound = ungated if len(parts) == 1 else gated_bound
    assert np.max(np.abs(want)) < bound
    assert_codes_stand_for(dx, want, E5M2, bound)
    assert_close(sums, np.sum(np.asarray(want, np.float64), axis=0))
    again = ops.activation_fwd(parts, **how)
    assert y.rows is None
    assert_same_bits(y.columns, np.asarray(again.rows).T)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("activation", FORMULAS)
def test_gradient_bounds_hold_and_are_tight(activation, dtype):
  # Gradients are steepest between 1 and 2.
  x = jnp.concatenate([jnp.linspace(-8, 8, 2**14), jnp.linspace(1, 2, 2**14)])
  groups = Groups(GROUP, dtype)
  gate = ops.quantize_groups(x.reshape(-1, GROUP), groups=groups)
  ones = jnp.ones(gate.qvalue.shape)
  up = ops.quantize_groups(ones, groups=groups)
  for parts in ((gate,), (gate, up)):
    gradients = ops.activation_bwd(ones, parts, activation=activation)
    largest = np.max(np.abs(gradients), axis=(0, 2))
    bounds = gradient_bounds(ones, parts)
    assert bounds.shape == (len(ones), 1)
    assert np.all(largest <= bounds[:, 0])
    assert np.max(largest / bounds[:, 0]) > 0.97


def test_gradient_bounds_do_not_depend_on_groups_of_zeros():
  # A group of zeros must not have a large scale.
  x = jnp.full((ROWS, 4 * GROUP), 1e-4).at[0, GROUP:].set(0)
  part = ops.quantize_groups(x, groups=Groups(GROUP))
  dy = jnp.ones(x.shape)
  bounds = gradient_bounds(dy, (part, part))
  assert 1e-4 < np.max(bounds) < 1.2e-4
  assert np.all(bounds[0, 1:] < 1e-30)


def test_gradient_bounds_of_a_tensor_with_one_scale():
  x = gradient((ROWS, 64))
  part = quantize(x, group_size=None)
  dy = gradient((ROWS, 64), 1)
  bounds = gradient_bounds(dy, (part, part))
  largest = np.max(np.abs(dy), axis=1) * np.max(np.abs(x)) * 1.13
  np.testing.assert_allclose(bounds[:, 0], largest, rtol=1e-6)


def test_formats_without_range_to_spare_get_the_exact_scale():
  x, _ = in_groups((ROWS, 64), 1)
  dy = gradient((ROWS, 64))
  how = dict(activation="silu", scale=jnp.float32(1))
  [want] = ops.activation_bwd(dy, (x,), activation="silu")
  dx, *_ = ops.activation_bwd_operands(dy, (x,), gradient=PerTensor(), **how)
  assert_codes_stand_for(dx, want)


@pytest.mark.parametrize("dtype", ["float8_e5m2", np.dtype("float8_e5m2")])
def test_scale_does_not_depend_on_how_a_format_is_spelled(dtype):
  x, _ = in_groups((ROWS, 64), 1)
  dy = gradient((ROWS, 64))
  how = dict(activation="silu", scale=jnp.float32(1))
  want, *_ = ops.activation_bwd_operands(dy, (x,), **how)
  dx, *_ = ops.activation_bwd_operands(
    dy, (x,), gradient=PerTensor(dtype), **how
  )
  assert dx.scale == want.scale


def test_activations_match_float64_on_degenerate_groups():
  names = sorted(cases.finite_groups(1))
  x, values = degenerate(names)
  dy = jnp.ones(values.shape)  # If dy is 1, dx is the derivative.
  values64 = np.asarray(values, np.float64)
  with np.errstate(over="ignore"):
    silu = silu64(values64)
  # Subnormal values may be treated as zero.
  got = ops.activation_values(values, activation="silu")
  error = np.abs(np.asarray(got, np.float64) - silu)
  assert np.all(error <= 1e-6 * np.abs(silu) + oracles.SMALLEST_NORMAL)
  for activation in FORMULAS:
    how = dict(activation=activation)
    _, scale = ops.activation_input(
      values, gated=False, groups=Groups(GROUP), **how
    )
    codes = ops.activation_fwd((x,), scale=scale, **how)
    assert np.all(np.isfinite(codes.rows.astype(jnp.float32)))
    (slope,) = ops.activation_bwd(dy, (x,), **how)
    # Far from zero, the derivative is 0 or 1.
    far = np.abs(values64) > (200 if activation == "silu" else 20)
    assert far.any() and np.all(np.isfinite(slope))
    # The derivative of `gelu_quick` differs from 0 or 1 by at most
    # 1.702 * 20 * exp(-1.702 * 20).
    off = 0 if activation == "silu" else 1e-13
    np.testing.assert_allclose(slope[far], values64[far] > 0, rtol=0, atol=off)
    ones, _ = in_groups(values.shape)
    for leaf in ops.activation_bwd(0.25 * dy, (ones, x), **how):
      assert np.all(np.isfinite(leaf))


def test_activations_of_nan_are_nan():
  x = gradient((2, 32)).at[1, 3].set(jnp.nan)
  q = ops.quantize_groups(x, groups=Groups(GROUP))
  fine, _ = in_groups((2, 32))
  dy = gradient((2, 32))
  gate_up = jnp.concatenate([x, dy], axis=-1)
  for activation in FORMULAS:
    how = dict(activation=activation)
    (gate, _), scale = ops.activation_input(
      gate_up, gated=True, groups=Groups(GROUP), **how
    )
    one = dict(scale=jnp.float32(1), **how)
    assert_nans(
      gate=gate,
      scale=scale,
      fwd=ops.activation_fwd((q,), **one),
      gated_fwd=ops.activation_fwd((fine, q), **one),
      bwd=ops.activation_bwd(dy, (q,), **how)[0],
      gated_bwd=ops.activation_bwd(dy, (fine, q), **how)[0],
    )
