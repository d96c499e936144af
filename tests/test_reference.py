# SPDX-License-Identifier: Apache-2.0
"""Every operation against float64, or `jax.vjp` of a formula written here.

Inputs are quantized first, and the oracle starts from the values that the codes
stand for: what an operation computes is compared, never what quantizing loses.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import qtensor, reference
from coat_jax.formats import E4M3, E5M2
from tests import cases, oracles
from tests.comparing import assert_close, assert_same_bits

GROUP = 16
# Two widths of two groups and more: whole groups, and a short last one.
WIDTHS = (64, 43)
ROWS = 6


def in_groups(shape, seed=0, factor=1.0):
  """1 x 16 codes and the f32 values they stand for."""
  x = factor * np.random.default_rng(seed).normal(size=shape)
  q = reference.quantize_groups(jnp.float32(x), group_size=GROUP)
  return q, qtensor.dequantize(q, group_size=GROUP)


def gradient(shape, seed=9):
  return jnp.float32(np.random.default_rng(seed).normal(size=shape))


def assert_codes_stand_for(q, values, dtype=E4M3):
  """One scale, from the values' amax, and no code off by more than half a step.

  Values are f32 and may be off by 1e-6 of the largest.
  """
  values = np.asarray(values, np.float64)
  assert q.qvalue.dtype == dtype and q.scale.dtype == jnp.float32
  amax = np.max(np.abs(values))
  assert_close(q.scale, amax / oracles.QMAX[dtype], 1e-6)
  scale = float(q.scale)
  error = np.abs(np.asarray(q.qvalue, np.float64) * scale - values)
  bound = scale * oracles.fp8_error_bound(values / scale, dtype) + 1e-6 * amax
  assert np.all(error <= bound)


# --- Linear ------------------------------------------------------------------


def float64(q):
  return np.asarray(q.qvalue, np.float64) * float(q.scale)


@pytest.mark.parametrize("rows", [(6,), (2, 3), ()])
def test_linear_products_equal_float64_of_the_operands(rows):
  d, f = 40, 24
  x = reference.quantize_tensor(gradient((*rows, d), 0))
  w = reference.quantize_tensor(gradient((d, f), 1))
  g = reference.quantize_tensor(gradient((*rows, f), 2), dtype=E5M2)
  x64, w64, g64 = float64(x), float64(w), float64(g)

  def within(actual, a, b, terms):
    # Products of two FP8 values are exact in f32. A sum of `terms` of them is
    # off by (terms - 1) 2^-24 of the sum of magnitudes; its scale (a product)
    # and its product with it add a rounding each.
    bound = (terms + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert np.all(np.abs(np.asarray(actual, np.float64) - a @ b) <= bound)

  y = reference.linear_fwd(x, w, dtype=jnp.float32)
  within(y, x64, w64, d)
  within(reference.linear_dgrad(g, w, dtype=jnp.float32), g64, w64.T, f)
  flat = -1, x64.shape[-1]
  dw = reference.linear_wgrad(x, g)
  assert dw.dtype == jnp.float32
  within(dw, x64.reshape(flat).T, g64.reshape(-1, f), x64.size // d)
  assert_same_bits(reference.linear_fwd(x, w), y.astype(jnp.bfloat16))
  assert reference.linear_dgrad(g, w).dtype == jnp.bfloat16


# --- Norms -------------------------------------------------------------------


def norm(x, gamma, beta, kind, eps):
  """The formula, in the precision of x."""
  mean = x.mean(-1, keepdims=True) if kind == "layer" else 0.0
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  y = (x - mean) / (variance + eps) ** 0.5
  y = y if gamma is None else y * gamma[None]
  return y if beta is None else y + beta[None]


def norm_case(width, has_gamma, has_beta):
  x, values = in_groups((ROWS, width), factor=3)
  rng = np.random.default_rng(1)
  gamma = jnp.float32(1 + rng.normal(size=width)) if has_gamma else None
  beta = jnp.float32(rng.normal(size=width)) if has_beta else None
  return x, values, gamma, beta


NORMS = [
  (kind, width, has_gamma, has_beta, eps)
  for kind in ("rms", "layer")
  for width, has_gamma, has_beta, eps in (
    (64, True, True, 1e-5),
    (43, True, False, 1e-1),
    (43, False, True, 1e-5),
    (64, False, False, 1.0),
  )
]


@pytest.mark.parametrize("kind, width, has_gamma, has_beta, eps", NORMS)
def test_norm_forward_equals_float64(kind, width, has_gamma, has_beta, eps):
  x, values, gamma, beta = norm_case(width, has_gamma, has_beta)
  got, stats = reference.norm_values(values, gamma, beta, kind=kind, eps=eps)
  values64 = np.asarray(values, np.float64)
  want = norm(values64, gamma, beta, kind, eps)
  # f32 means of at most 64 values: 64 * 2^-24 at worst, 1e-6 in practice.
  assert_close(got, want, 3e-6)
  mean = values64.mean(-1)
  moment = values64.var(-1) if kind == "layer" else (values64**2).mean(-1)
  assert_close(stats.rstd, (moment + eps) ** -0.5, 3e-6)
  assert stats.rstd.dtype == jnp.float32
  if kind == "layer":
    assert_close(stats.mean, mean, 3e-6)
  else:
    assert stats.mean is None
  arguments = dict(kind=kind, eps=eps, group_size=GROUP)
  q, fwd_stats = reference.norm_fwd(x, gamma, beta, **arguments)
  assert_codes_stand_for(q, want)
  assert_same_bits(fwd_stats, stats)
  again, _ = reference.norm_fwd(x, gamma, beta, scale=q.scale, **arguments)
  assert_same_bits(again, q)


@pytest.mark.parametrize("kind, width, has_gamma, has_beta, eps", NORMS)
def test_norm_backward_is_the_gradient(kind, width, has_gamma, has_beta, eps):
  x, values, gamma, beta = norm_case(width, has_gamma, has_beta)
  _, stats = reference.norm_values(values, gamma, beta, kind=kind, eps=eps)
  dy = gradient((ROWS, width))
  ones, zeros = jnp.ones(width), jnp.zeros(width)
  _, vjp = jax.vjp(
    lambda *args: norm(*args, kind, eps),
    values,
    ones if gamma is None else gamma,
    zeros if beta is None else beta,
  )
  got = reference.norm_bwd(
    dy, x, gamma, stats, group_size=GROUP, dtype=jnp.float32
  )
  assert_close(got, vjp(dy))
  dx, dgamma, dbeta = reference.norm_bwd(dy, x, gamma, stats, group_size=GROUP)
  assert dx.dtype == jnp.bfloat16
  assert dgamma.dtype == dbeta.dtype == jnp.float32


# --- Activation functions ----------------------------------------------------


def silu64(x):
  return x / (1 + np.exp(-x))


def gelu64(x, approximate):
  if approximate:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_forwards_equal_float64(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  a64, b64 = np.asarray(a_values, np.float64), np.asarray(b_values, np.float64)
  silu, product = silu64(a64), silu64(a64) * b64
  assert_close(reference.silu_values(a_values), silu, 1e-6)
  q = reference.silu_fwd(a, group_size=GROUP)
  assert_same_bits(
    q,
    reference.quantize_groups(reference.silu_values(a_values), group_size=16),
  )
  assert_codes_stand_for(reference.mul_fwd(a, b, group_size=GROUP), a64 * b64)
  assert_codes_stand_for(reference.silu_mul_fwd(a, b, group_size=16), product)
  for approximate in (True, False):
    want = gelu64(a64, approximate)
    got = reference.gelu_values(a_values, approximate=approximate)
    assert_close(got, want, 1e-6)
    codes = reference.gelu_fwd(a, approximate=approximate, group_size=GROUP)
    assert_codes_stand_for(codes, want)


def test_operands_are_written_again_with_a_scale_they_had():
  a, _ = in_groups((ROWS, 43), 1)
  b, _ = in_groups((ROWS, 43), 2)
  for forward in (
    functools.partial(reference.mul_fwd, a, b),
    functools.partial(reference.silu_mul_fwd, a, b),
    functools.partial(reference.gelu_fwd, a, approximate=True),
  ):
    q = forward(group_size=GROUP)
    again = forward(group_size=GROUP, scale=q.scale)
    assert_same_bits(again, q)
    doubled = forward(group_size=GROUP, scale=2 * q.scale)
    assert float(doubled.scale) == 2 * float(q.scale)
    assert np.max(np.abs(np.asarray(doubled.qvalue, np.float32))) == 224


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_backwards_are_the_gradients(width):
  a, a_values = in_groups((ROWS, width), 1, factor=4)
  b, b_values = in_groups((ROWS, width), 2)
  dy = gradient((ROWS, width))

  def oracle(f, *args):
    return jax.vjp(f, *args)[1](dy)

  assert_close(
    (reference.silu_bwd(dy, a, group_size=GROUP),),
    oracle(jax.nn.silu, a_values),
  )
  assert_close(
    reference.mul_bwd(dy, a, b, group_size=GROUP),
    oracle(jnp.multiply, a_values, b_values),
  )
  assert_close(
    reference.silu_mul_bwd(dy, a, b, group_size=GROUP),
    oracle(lambda x, y: jax.nn.silu(x) * y, a_values, b_values),
  )
  for approximate in (True, False):
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)
    got = reference.gelu_bwd(dy, a, approximate=approximate, group_size=GROUP)
    assert_close((got,), oracle(gelu, a_values))


# --- Residual add ------------------------------------------------------------


def test_residual_add_rounds_once_and_quantizes_the_sum():
  x = gradient((ROWS, 43), 1).astype(jnp.bfloat16)
  y = 0.01 * gradient((ROWS, 43), 2)
  total = x.astype(jnp.float32) + y
  got, q = reference.residual_add_fwd(x, y, group_size=GROUP)
  assert_same_bits(got, total.astype(jnp.bfloat16))
  # From the f32 sum: from the BF16 one some codes would differ.
  want = reference.quantize_groups(total, group_size=GROUP)
  assert_same_bits(q, want)
  rounded = reference.quantize_groups(got, group_size=GROUP)
  assert np.any(np.asarray(rounded.qvalue) != np.asarray(q.qvalue))
  g, g_q = reference.residual_add_bwd(x, y)
  assert_same_bits(g, got)
  assert_codes_stand_for(g_q, total, E5M2)


# --- Degenerate groups -------------------------------------------------------


def degenerate(names):
  groups = cases.finite_groups(GROUP)
  x = np.stack([groups[name] for name in names])
  q = reference.quantize_groups(jnp.asarray(x), group_size=GROUP)
  return q, qtensor.dequantize(q, group_size=GROUP)


# Squares and products of these overflow f32, in any implementation.
TOO_LARGE = {"large", "largest", "huge_ratio"}


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "name", sorted(set(cases.finite_groups(1)) - TOO_LARGE)
)
def test_norms_of_degenerate_groups(name, kind):
  x, values = degenerate([name])
  y, stats = reference.norm_values(values, None, None, kind=kind, eps=1e-5)
  values64 = np.asarray(values, np.float64)
  want = norm(values64, None, None, kind, 1e-5)
  # Centring cancels: what is left is off by 2^-24 of the group's largest. And
  # what is below f32's normal numbers may count as zero.
  lost = 2.0**-22 * np.max(np.abs(values64)) + oracles.SMALLEST_NORMAL
  limit = 1e-5 * np.max(np.abs(want)) + lost * np.asarray(stats.rstd)
  assert np.max(np.abs(y - want)) <= limit
  q, stats = reference.norm_fwd(
    x, None, None, kind=kind, eps=1e-5, group_size=GROUP
  )
  assert np.all(np.isfinite(q.qvalue.astype(jnp.float32)))
  assert np.isfinite(q.scale)
  dy = gradient((1, GROUP))
  got = reference.norm_bwd(
    dy, x, None, stats, group_size=GROUP, dtype=jnp.float32
  )
  assert all(np.all(np.isfinite(leaf)) for leaf in got)
  if name in ("zeros", "one_nonzero"):
    f = functools.partial(norm, gamma=None, beta=None, kind=kind, eps=1e-5)
    (dx,) = jax.vjp(f, values)[1](dy)
    assert_close(got[0], dx)


def test_activations_of_degenerate_groups():
  names = sorted(cases.finite_groups(1))
  x, values = degenerate(names)
  dy = jnp.ones(values.shape)  # 1: dx is the slope itself
  values64 = np.asarray(values, np.float64)
  with np.errstate(over="ignore"):
    silu = silu64(values64)
  q = reference.silu_fwd(x, group_size=GROUP)
  assert np.all(np.isfinite(q.qvalue.astype(jnp.float32)))
  # What is below f32's normal numbers may count as zero.
  error = np.abs(np.asarray(reference.silu_values(values), np.float64) - silu)
  assert np.all(error <= 1e-6 * np.abs(silu) + oracles.SMALLEST_NORMAL)
  for approximate in (True, False):
    codes = reference.gelu_fwd(x, approximate=approximate, group_size=GROUP)
    assert np.all(np.isfinite(codes.qvalue.astype(jnp.float32)))
    slope = reference.gelu_bwd(dy, x, approximate=approximate, group_size=GROUP)
    # Far from zero the slope is 0 or 1.
    far = np.abs(values64) > 20
    assert far.any() and np.all(slope[far] == (values64[far] > 0))
    assert np.all(np.isfinite(slope))
  slope = reference.silu_bwd(dy, x, group_size=GROUP)
  far = np.abs(values64) > 200
  assert np.all(slope[far] == (values64[far] > 0))
  assert np.all(np.isfinite(slope))
  ones, _ = in_groups(values.shape)
  for op in (reference.mul_bwd, reference.silu_mul_bwd):
    for leaf in op(0.25 * dy, ones, x, group_size=GROUP):
      assert np.all(np.isfinite(leaf))


def test_degenerate_sums_and_operands_are_finite():
  names = sorted(cases.finite_groups(1))
  groups = cases.finite_groups(GROUP)
  x = jnp.stack([groups[name] for name in names])
  total, q = reference.residual_add_fwd(x, jnp.zeros(x.shape), group_size=GROUP)
  error = np.abs(np.asarray(total, np.float64) - np.asarray(x, np.float64))
  assert np.all(error < oracles.SMALLEST_NORMAL)  # Subnormals may become 0.
  assert np.all(np.isfinite(qtensor.dequantize(q, group_size=GROUP)))
  for name, row in zip(names, x, strict=True):
    for dtype in (E4M3, E5M2):
      operand = reference.quantize_tensor(row[None], dtype=dtype)
      assert np.all(np.isfinite(operand.qvalue.astype(jnp.float32))), name
  zero = reference.quantize_tensor(jnp.zeros((4, 8)))
  np.testing.assert_array_equal(
    reference.linear_fwd(zero, reference.quantize_tensor(jnp.ones((8, 3)))), 0
  )


def test_a_nan_comes_out_as_nan():
  x = gradient((2, 32)).at[1, 3].set(jnp.nan)
  q = reference.quantize_groups(x, group_size=GROUP)
  fine, _ = in_groups((2, 32))
  dy = gradient((2, 32))
  stats = reference.norm_values(x, None, None, kind="layer", eps=1e-5)[1]
  keywords = dict(group_size=GROUP)
  results = {
    "norm": reference.norm_fwd(q, None, None, kind="rms", eps=1e-5, **keywords)[
      0
    ],
    "norm_bwd": reference.norm_bwd(dy, q, None, stats, **keywords)[0],
    "silu": reference.silu_fwd(q, **keywords),
    "silu_bwd": reference.silu_bwd(dy, q, **keywords),
    "mul": reference.mul_fwd(fine, q, **keywords),
    "mul_bwd": reference.mul_bwd(dy, fine, q, **keywords)[0],
    "silu_mul": reference.silu_mul_fwd(fine, q, **keywords),
    "silu_mul_bwd": reference.silu_mul_bwd(dy, fine, q, **keywords)[0],
    "gelu": reference.gelu_fwd(q, approximate=True, **keywords),
    "gelu_bwd": reference.gelu_bwd(dy, q, approximate=True, **keywords),
    "add": reference.residual_add_fwd(x, dy, **keywords)[0],
    "linear": reference.linear_fwd(
      reference.quantize_tensor(x), reference.quantize_tensor(dy.T)
    ),
  }
  for name, result in results.items():
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(result)]
    assert any(np.any(np.isnan(leaf)) for leaf in leaves), name
