# SPDX-License-Identifier: Apache-2.0
"""Compares operations with float64, or with `jax.vjp` of formulas given here.

The formulas start from dequantized inputs, so quantization errors of inputs do
not count.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops import Groups, PerTensor
from tests import cases, oracles
from tests.comparing import assert_close, assert_same_bits

GROUP = 16
# One width consists of whole groups; the other has a short last group.
WIDTHS = (64, 43)
ROWS = 6


def unquantized(shape, seed=0, factor=1.0):
  return jnp.float32(factor * np.random.default_rng(seed).normal(size=shape))


def in_groups(shape, seed=0, factor=1.0):
  """Returns values quantized in groups of 16, and their f32 values."""
  x = unquantized(shape, seed, factor)
  q = ops.quantize_groups(x, groups=Groups(GROUP))
  return q, q.dequantize()


def gradient(shape, seed=9):
  return jnp.float32(np.random.default_rng(seed).normal(size=shape))


def float64(codes, scale):
  return np.asarray(codes, np.float64) * float(scale)


def assert_codes_stand_for(q, values, dtype=E4M3, bound=None):
  """Checks the scale, and that codes are off by at most half a step.

  The scale must come from `bound`, or else from the largest magnitude. The f32
  values that were quantized may be off by 1e-6 of the largest.
  """
  values = np.asarray(values, np.float64)
  assert q.scale.dtype == jnp.float32
  rows = q.columns.T.reshape(values.shape) if q.rows is None else q.rows
  assert rows.dtype == dtype
  if q.rows is not None and q.columns is not None:
    flat = rows.reshape(-1, rows.shape[-1])
    assert_same_bits(q.columns, np.asarray(flat).T)
  amax = np.max(np.abs(values))
  expected = amax if bound is None else bound
  assert_close(q.scale, expected / oracles.QMAX[dtype], 1e-6)
  scale = float(q.scale)
  error = np.abs(float64(rows, scale) - values)
  step = scale * oracles.fp8_error_bound(values / scale, dtype)
  assert np.all(error <= step + 1e-6 * amax)


# --- Linear ------------------------------------------------------------------


# If gradients are 1e-34, the product of two scales is subnormal.
@pytest.mark.parametrize(
  "rows, x_size, g_size",
  [
    ((6,), 1, 1),
    ((2, 3), 1, 1),
    ((), 1, 1),
    ((6,), 1, 1e-34),
    ((6,), 1e30, 1e-34),
  ],
)
def test_linear_matmuls_match_float64(rows, x_size, g_size):
  d, f = 40, 24
  quantize = functools.partial(ops.quantize_tensor, layout="both")
  x = quantize(x_size * gradient((*rows, d), 0))
  w = quantize(gradient((d, f), 1))
  g = quantize(g_size * gradient((*rows, f), 2), scaling=PerTensor(E5M2))
  x64, w64, g64 = (float64(q.rows, q.scale) for q in (x, w, g))

  def within(actual, a, b, terms):
    # Products of two FP8 values are exact in f32. A sum of `terms` of them is
    # off by (terms - 1) * 2^-24 of the sum of magnitudes, and multiplying it by
    # two scales rounds twice more.
    bound = (terms + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert np.all(np.abs(np.asarray(actual, np.float64) - a @ b) <= bound)

  y = ops.linear_fwd(x, w, dtype=jnp.float32)
  within(y, x64, w64, d)
  dgrad = jax.jit(functools.partial(ops.linear_dgrad, dtype=jnp.float32))
  within(dgrad(g, w), g64, w64.T, f)
  flat = -1, x64.shape[-1]
  dw = ops.linear_wgrad(x, g)
  assert dw.dtype == jnp.float32
  within(dw, x64.reshape(flat).T, g64.reshape(-1, f), x64.size // d)
  assert_same_bits(ops.linear_fwd(x, w), y.astype(jnp.bfloat16))
  assert ops.linear_dgrad(g, w).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_linear_adds_bias_and_residual_before_it_rounds(dtype):
  x = ops.quantize_tensor(gradient((64, 40), 0))
  w = ops.quantize_tensor(gradient((40, 24), 1), layout="columns")
  stream = gradient((64, 24), 3).astype(dtype)
  bias = gradient((24,), 4)
  y = ops.linear_fwd(x, w, dtype=jnp.float32)
  biased = y + bias.astype(jnp.bfloat16).astype(jnp.float32)[None]
  got = ops.linear_fwd(x, w, bias=bias)
  assert_same_bits(got, biased.astype(jnp.bfloat16))
  stream = stream.astype(jnp.float32)
  got = ops.linear_fwd(x, w, add=stream)
  assert_same_bits(got, (y + stream).astype(jnp.bfloat16))
  got = ops.linear_fwd(x, w, add=stream, bias=bias)
  assert_same_bits(got, (biased + stream).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norm_backward_adds_before_it_rounds(dtype):
  x, _ = in_groups((64, 32))
  stats = ops.NormStats(None, jnp.ones(64))
  dy, around = gradient((64, 32)), gradient((64, 32), 5).astype(dtype)
  args = dy, x, None, stats
  dx = ops.norm_bwd(*args, dtype=jnp.float32)[0]
  got = ops.norm_bwd(*args, add=around)[0]
  total = dx + around.astype(jnp.float32)
  assert_same_bits(got, total.astype(jnp.bfloat16))


# --- Norms -------------------------------------------------------------------


def norm(x, gamma, beta, kind, eps):
  """Computes a norm by its formula, in the dtype of x."""
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
def test_norm_forward_matches_float64(kind, width, has_gamma, has_beta, eps):
  x, values, gamma, beta = norm_case(width, has_gamma, has_beta)
  got, stats = ops.norm_values(values, gamma, beta, kind=kind, eps=eps)
  values64 = np.asarray(values, np.float64)
  want = norm(values64, gamma, beta, kind, eps)
  # The error of an f32 mean of at most 64 values is below 64 * 2^-24, and in
  # practice about 1e-6.
  assert_close(got, want, 3e-6)
  mean = values64.mean(-1)
  moment = values64.var(-1) if kind == "layer" else (values64**2).mean(-1)
  assert_close(stats.rstd, (moment + eps) ** -0.5, 3e-6)
  assert stats.rstd.dtype == jnp.float32
  if kind == "layer":
    assert_close(stats.mean, mean, 3e-6)
  else:
    assert stats.mean is None
  arguments = dict(kind=kind, eps=eps, groups=Groups(GROUP))
  x_q, fwd_stats, scale = ops.norm_input(
    unquantized((ROWS, width), factor=3), gamma, beta, **arguments
  )
  assert_same_bits(x_q, x)
  assert_same_bits(fwd_stats, stats)
  for layout in ("rows", "columns", "both"):
    q = ops.norm_fwd(x, gamma, beta, stats, scale=scale, layout=layout)
    assert (q.rows is None) == (layout == "columns")
    assert (q.columns is None) == (layout == "rows")
    assert_codes_stand_for(q, want)


@pytest.mark.parametrize("kind, width, has_gamma, has_beta, eps", NORMS)
def test_norm_bwd_matches_the_gradient(kind, width, has_gamma, has_beta, eps):
  x, values, gamma, beta = norm_case(width, has_gamma, has_beta)
  _, stats = ops.norm_values(values, gamma, beta, kind=kind, eps=eps)
  dy = gradient((ROWS, width))
  ones, zeros = jnp.ones(width), jnp.zeros(width)
  _, vjp = jax.vjp(
    lambda *args: norm(*args, kind, eps),
    values,
    ones if gamma is None else gamma,
    zeros if beta is None else beta,
  )
  got = ops.norm_bwd(dy, x, gamma, stats, dtype=jnp.float32)
  assert_close(got, vjp(dy))
  dx, dgamma, dbeta = ops.norm_bwd(dy, x, gamma, stats)
  assert dx.dtype == jnp.bfloat16
  around = gradient((ROWS, width), 5).astype(jnp.bfloat16)
  total = ops.norm_bwd(dy, x, gamma, stats, dtype=jnp.float32, add=around)
  assert_close(total[0], got[0] + around.astype(jnp.float32), 1e-6)
  assert dgamma.dtype == dbeta.dtype == jnp.float32


# --- Degenerate groups -------------------------------------------------------


def degenerate(names):
  groups = cases.finite_groups(GROUP)
  x = np.stack([groups[name] for name in names])
  q = ops.quantize_groups(jnp.asarray(x), groups=Groups(GROUP))
  return q, q.dequantize()


# The squares or products of these groups overflow f32 in any implementation.
TOO_LARGE = {"large", "largest", "huge_ratio"}


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "name", sorted(set(cases.finite_groups(1)) - TOO_LARGE)
)
def test_norms_match_float64_on_degenerate_groups(name, kind):
  x, values = degenerate([name])
  y, stats = ops.norm_values(values, None, None, kind=kind, eps=1e-5)
  values64 = np.asarray(values, np.float64)
  want = norm(values64, None, None, kind, 1e-5)
  # Subtracting the mean may cancel, which leaves an error of a few 2^-24 of the
  # group's largest value. Subnormals may be treated as zero.
  lost = 2.0**-22 * np.max(np.abs(values64)) + oracles.SMALLEST_NORMAL
  limit = 1e-5 * np.max(np.abs(want)) + lost * np.asarray(stats.rstd)
  assert np.max(np.abs(y - want)) <= limit
  scale = ops.tensor_scale(y)
  q = ops.norm_fwd(x, None, None, stats, scale=scale)
  assert np.all(np.isfinite(q.rows.astype(jnp.float32)))
  assert np.isfinite(q.scale)
  dy = gradient((1, GROUP))
  got = ops.norm_bwd(dy, x, None, stats, dtype=jnp.float32)
  assert all(np.all(np.isfinite(leaf)) for leaf in got)
  if name in ("zeros", "one_nonzero"):
    f = functools.partial(norm, gamma=None, beta=None, kind=kind, eps=1e-5)
    (dx,) = jax.vjp(f, values)[1](dy)
    assert_close(got[0], dx)


def test_operands_of_degenerate_rows_are_finite():
  for name, row in cases.finite_groups(GROUP).items():
    for dtype in (E4M3, E5M2):
      operand = ops.quantize_tensor(
        jnp.asarray(row[None]), scaling=PerTensor(dtype)
      )
      assert np.all(np.isfinite(operand.rows.astype(jnp.float32))), name
  zero = ops.quantize_tensor(jnp.zeros((4, 8)))
  ones = ops.quantize_tensor(jnp.ones((8, 3)), layout="columns")
  np.testing.assert_array_equal(ops.linear_fwd(zero, ones), 0)


def test_norms_and_matmuls_of_nan_are_nan():
  x = gradient((2, 32)).at[1, 3].set(jnp.nan)
  q = ops.quantize_groups(x, groups=Groups(GROUP))
  dy = gradient((2, 32))
  stats = ops.norm_values(x, None, None, kind="layer", eps=1e-5)[1]
  norm_input = ops.norm_input(
    x, None, None, kind="rms", eps=1e-5, groups=Groups(GROUP)
  )
  w = ops.quantize_tensor(dy.T, layout="columns")
  assert_nans(
    norm_input=norm_input[0],
    norm_scale=norm_input[2],
    norm=ops.norm_fwd(q, None, None, stats, scale=jnp.float32(1)),
    norm_bwd=ops.norm_bwd(dy, q, None, stats)[0],
    linear=ops.linear_fwd(ops.quantize_tensor(x), w),
  )


def assert_nans(**results):
  """Checks that each result, a tree of arrays, contains NaN."""
  for name, result in results.items():
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(result)]
    assert any(np.any(np.isnan(leaf)) for leaf in leaves), name
