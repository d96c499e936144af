# SPDX-License-Identifier: Apache-2.0
"""Activation functions against float64, or `jax.vjp` of formulas."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.ops import Groups
from coat_jax.pallas.triton import activations
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
  "gelu_tanh": functools.partial(gelu64, approximate=True),
  "gelu": functools.partial(gelu64, approximate=False),
}
FUNCTIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def gelu_slope64(x):
  """Computes the derivative of the tanh approximation."""
  c = (2 / np.pi) ** 0.5
  tanh = np.tanh(c * (x + 0.044715 * x**3))
  slope = c * (1 + 3 * 0.044715 * x**2)
  return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope


@jax.custom_jvp
def gelu_of_slope64(x):
  """Computes GELU with its float64 derivative; f32's is off by 2e-6."""
  return jnp.float32(gelu64(np.asarray(x, np.float64), True))


@gelu_of_slope64.defjvp
def _gelu_jvp(primals, tangents):
  slope = gelu_slope64(np.asarray(primals[0], np.float64))
  return gelu_of_slope64(*primals), jnp.float32(slope) * tangents[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_forwards_equal_float64(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  a64, b64 = np.asarray(a_values, np.float64), np.asarray(b_values, np.float64)
  for activation, formula in FORMULAS.items():
    values = ops.activation_values(a_values, activation=activation)
    assert_close(values, formula(a64), 1e-6)
    q = ops.activation_fwd(a, activation=activation, groups=Groups(GROUP))
    assert_same_bits(q, ops.quantize_groups(values, groups=Groups(GROUP)))
  assert_codes_stand_for(ops.mul_fwd(a, b), a64 * b64)
  gate = unquantized((ROWS, width), 1, factor=4)
  gate_up = jnp.concatenate([gate, unquantized((ROWS, width), 2)], axis=-1)
  for activation, formula in FORMULAS.items():
    how = dict(activation=activation)
    *got, scale = ops.gated_input(gate_up, groups=Groups(GROUP), **how)
    assert_same_bits(got, (a, b))
    for layout in ("rows", "columns", "both"):
      q = ops.gated_fwd(a, b, scale=scale, layout=layout, **how)
      assert_codes_stand_for(q, formula(a64) * b64)
  for approximate in (True, False, "sigmoid"):
    want = gelu64(a64, approximate)
    got = ops.gelu_values(a_values, approximate=approximate)
    assert_close(got, want, 1e-6)
    x_q, scale = ops.gelu_input(
      gate, approximate=approximate, groups=Groups(GROUP)
    )
    assert_same_bits(x_q, a)
    codes = ops.gelu_fwd(a, approximate=approximate, scale=scale)
    assert_codes_stand_for(codes, want)


def test_unknown_approximation_of_gelu_is_refused():
  x = jnp.ones((1, GROUP))
  for f in (ops.gelu_values, ops.gelu_derivative):
    unchecked = inspect.unwrap(f)  # Users have no checks of annotations.
    with pytest.raises(ValueError, match="False or \"sigmoid\", got 'tanh'"):
      unchecked(x, approximate="tanh")


def test_gelu_is_near_float64_at_every_value():
  # Also where GELU is small: a slightly wrong formula shows there.
  x = np.linspace(-5, 5, 1001, dtype=np.float32)
  x64 = np.float64(x)
  # The error is exp(2 u)'s: 2 u is at most 12, and off by 2^-24 of itself.
  for values in (
    ops.gelu_values(jnp.asarray(x), approximate=True),
    x * np.asarray(activations.share(jnp.asarray(x), "gelu_tanh", True)),
  ):
    np.testing.assert_allclose(values, gelu64(x64, True), rtol=3e-6, atol=0)
  slope = ops.gelu_derivative(jnp.asarray(x), approximate=True)
  # Two terms, of which the second cancels the first around -0.75.
  terms = np.abs(gelu64(x64, True) / np.where(x == 0, 1, x64))
  terms += np.abs(gelu_slope64(x64) - terms)
  assert np.all(np.abs(slope - gelu_slope64(x64)) <= 5e-6 * terms)


def test_activation_operands_are_written_with_the_scale_given():
  a, _ = in_groups((ROWS, 43), 1)
  b, _ = in_groups((ROWS, 43), 2)
  for forward in (
    functools.partial(ops.gated_fwd, a, b, activation="silu"),
    functools.partial(ops.gelu_fwd, a, approximate=True),
  ):
    q = forward(scale=jnp.float32(2**-7))
    doubled = forward(scale=jnp.float32(2**-6))
    assert float(doubled.scale) == 2 * float(q.scale)
    largest = [
      np.max(np.abs(np.asarray(x.rows, np.float32))) for x in (q, doubled)
    ]
    assert largest[0] == 2 * largest[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_backwards_are_the_gradients(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  dy = gradient((ROWS, width))

  def oracle(f, *args):
    return jax.vjp(f, *args)[1](dy)

  assert_close(
    ops.mul_bwd(dy, a, b),
    oracle(jnp.multiply, a_values, b_values),
  )
  for activation, f in FUNCTIONS.items():
    how = dict(activation=activation)
    got = ops.activation_bwd(dy, a, **how)
    assert_close((got,), oracle(f, a_values))
    got = ops.gated_bwd(dy, a, b, **how)
    assert_close(got, oracle(lambda x, y, f=f: f(x) * y, a_values, b_values))
  for approximate in (True, False, "sigmoid"):
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)
    if approximate == "sigmoid":
      gelu = lambda x: x * jax.nn.sigmoid(1.702 * x)  # noqa: E731
    got = ops.gelu_bwd(dy, a, approximate=approximate)
    assert_close((got,), oracle(gelu, a_values))


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_backward_operands_are_the_gradients_with_one_scale(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  dy = gradient((ROWS, width))
  scale = jnp.float32(1 / 64)
  for activation, f in (("silu", jax.nn.silu), ("gelu_tanh", gelu_of_slope64)):
    how = dict(activation=activation)
    dgate_up, product = ops.gated_bwd_operands(dy, a, b, scale=scale, **how)
    want = jax.vjp(lambda x, y, f=f: f(x) * y, a_values, b_values)[1](dy)
    assert_codes_stand_for(dgate_up, np.concatenate(want, axis=-1), E5M2)
    again = ops.gated_fwd(a, b, scale=scale, **how)
    assert product.rows is None
    assert_same_bits(product.columns, np.asarray(again.rows).T)
  dx, output, _ = ops.gelu_bwd_operands(dy, a, approximate=True, scale=scale)
  # In f32 the gradient of a tanh is off by 2e-6 of the largest.
  slope = gelu_slope64(np.asarray(a_values, np.float64))
  assert_codes_stand_for(dx, np.asarray(dy, np.float64) * slope, E5M2)
  again = ops.gelu_fwd(a, approximate=True, scale=scale)
  assert output.rows is None
  assert_same_bits(output.columns, np.asarray(again.rows).T)


def test_activations_of_degenerate_groups():
  names = sorted(cases.finite_groups(1))
  x, values = degenerate(names)
  dy = jnp.ones(values.shape)  # 1: dx is the slope itself
  values64 = np.asarray(values, np.float64)
  with np.errstate(over="ignore"):
    silu = silu64(values64)
  q = ops.activation_fwd(x, activation="silu", groups=Groups(GROUP))
  assert np.all(np.isfinite(q.qvalue.astype(jnp.float32)))
  # Values below f32's normal numbers may count as zero.
  error = np.abs(np.asarray(ops.silu_values(values), np.float64) - silu)
  assert np.all(error <= 1e-6 * np.abs(silu) + oracles.SMALLEST_NORMAL)
  for approximate in (True, False, "sigmoid"):
    _, scale = ops.gelu_input(
      values, approximate=approximate, groups=Groups(GROUP)
    )
    codes = ops.gelu_fwd(x, approximate=approximate, scale=scale)
    assert np.all(np.isfinite(codes.rows.astype(jnp.float32)))
    slope = ops.gelu_bwd(dy, x, approximate=approximate)
    # Far from zero the slope is 0 or 1.
    far = np.abs(values64) > 20
    assert far.any() and np.all(np.isfinite(slope))
    # For the sigmoid it is off by 1.702 * 20 exp(-1.702 * 20) at most.
    np.testing.assert_allclose(
      slope[far], values64[far] > 0, rtol=0, atol=1e-13
    )
  slope = ops.activation_bwd(dy, x, activation="silu")
  far = np.abs(values64) > 200
  assert np.all(slope[far] == (values64[far] > 0))
  assert np.all(np.isfinite(slope))
  ones, _ = in_groups(values.shape)
  gated = functools.partial(ops.gated_bwd, activation="silu")
  for op in (ops.mul_bwd, gated):
    for leaf in op(0.25 * dy, ones, x):
      assert np.all(np.isfinite(leaf))


def test_activations_of_nan_are_nan():
  x = gradient((2, 32)).at[1, 3].set(jnp.nan)
  q = ops.quantize_groups(x, groups=Groups(GROUP))
  fine, _ = in_groups((2, 32))
  dy = gradient((2, 32))
  groups = dict(groups=Groups(GROUP))
  one = dict(scale=jnp.float32(1))
  gate_up = jnp.concatenate([x, dy], axis=-1)
  silu = dict(activation="silu")
  assert_nans(
    silu=ops.activation_fwd(q, **silu, **groups),
    silu_bwd=ops.activation_bwd(dy, q, **silu),
    mul=ops.mul_fwd(fine, q),
    mul_bwd=ops.mul_bwd(dy, fine, q)[0],
    gate=ops.gated_input(gate_up, **silu, **groups)[0],
    product_scale=ops.gated_input(gate_up, **silu, **groups)[2],
    gated=ops.gated_fwd(fine, q, **silu, **one),
    gated_bwd=ops.gated_bwd(dy, fine, q, **silu)[0],
    gelu=ops.gelu_fwd(q, approximate=True, **one),
    gelu_bwd=ops.gelu_bwd(dy, q, approximate=True),
  )
