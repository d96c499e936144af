# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's norms with their definitions.

Codes and scales of the input must be equal. The kernels sum rows in a different
order than XLA does. So statistics and the output's scale may differ by rounding
errors of f32, and only most of the other codes must be equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.ops.types import NormStats
from coat_jax.pallas.mosaic import norm, norm_backward
from tests import cases
from tests.comparing import assert_close, jit
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  assert_same_operand,
  lowered_for_h200,
  refused,
  with_tile,
)

BF16, F32 = jnp.bfloat16, jnp.float32
EPS = 1e-5


def run(fn, *args, jit=jit, **options):
  """Compiles and runs `fn`; only `scale` and `add` are traced options."""
  traced = {k: options.pop(k) for k in ("scale", "add") if k in options}
  return jit(functools.partial(fn, **options))(*args, **traced)


def interpret(fn, *args, **options):
  """Runs a kernel in the interpreter."""
  return run(fn, *args, interpret=True, **options)


def vectors(kind, n, dtype=F32):
  """Makes gamma and beta; beta is None for "rms"."""
  rng = np.random.default_rng(n)
  gamma, beta = (jnp.asarray(v, dtype) for v in rng.normal(size=(2, n)))
  return gamma, beta if kind == "layer" else None


def inputs(shape, kind, dtype=BF16, group_size=16):
  # Values are far from zero, so that a column that the kernel forgets to mask
  # changes mean and variance.
  x = jnp.asarray(cases.activations(shape) + 7, dtype)
  gamma, beta = vectors(kind, shape[-1])
  options = dict(kind=kind, eps=EPS, groups=Groups(group_size))
  return x, gamma, beta, options


def assert_same_stats(actual, expected):
  for a, e in zip(actual, expected, strict=True):
    assert (a is None) == (e is None)
    if e is not None:
      # A pairwise sum of n values rounds log2(n) times, each by up to 2^-24.
      np.testing.assert_allclose(a, e, rtol=1e-6)


def gradients(shape, kind, group_size=16, dtype=BF16):
  x, gamma, beta, options = inputs(shape, kind, group_size=group_size)
  x_q, stats, _ = run(ops.norm_input.definition, x, gamma, beta, **options)
  dy = jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)
  return dy, x_q, gamma, stats


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "shape, group_size",
  [
    ((2, 3, 2048), 16),
    ((5, 1152), 128),
    ((4, 768), 32),
    ((3, 272), 16),
    ((130, 768), 32),
    ((2, 64, 640), 128),
  ],
  ids=str,
)
def test_norm_input_kernel_matches_definition(shape, group_size, kind):
  # Some rows consist of whole loads; in others, the last load overlaps another.
  # From 128 rows on, each warp has a row. The last four of 130 overlap others.
  x, gamma, beta, options = inputs(shape, kind, group_size=group_size)
  actual = interpret(norm.norm_input, x, gamma, beta, **options)
  expected = run(ops.norm_input.definition, x, gamma, beta, **options)
  assert_same_groups(actual[0], expected[0])
  assert_same_stats(actual[1], expected[1])
  np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize("given", ["gamma", "beta", "neither"])
def test_norm_input_kernel_without_gamma_or_beta(given):
  _, gamma, beta, options = inputs((9, 1040), "layer")
  x = jnp.asarray(1000 + 100 * np.random.default_rng(0).normal(size=(9, 1040)))
  gamma = gamma.astype(BF16) if given == "gamma" else None
  beta = beta if given == "beta" else None
  _, stats, scale = interpret(norm.norm_input, x, gamma, beta, **options)
  wanted = run(ops.norm_input.definition, x, gamma, beta, **options)
  assert_same_stats(stats, wanted[1])
  np.testing.assert_allclose(scale, wanted[2], rtol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_input_kernel_on_degenerate_rows(kind):
  groups = cases.finite_groups(512)
  # Leave out rows whose squares overflow or whose mean squares underflow.
  for name in ("largest", "huge_ratio", "large"):
    del groups[name]
  x, options = np.stack(list(groups.values())), inputs((1, 512), kind)[-1]
  actual = interpret(norm.norm_input, jnp.asarray(x), None, None, **options)
  expected = run(
    ops.norm_input.definition, jnp.asarray(x), None, None, **options
  )
  assert_same_groups(actual[0], expected[0])
  values = np.asarray(expected[0].dequantize(), np.float64)
  if kind == "layer":
    mean = values.mean(axis=1)
    assert_close(actual[1].mean, mean, 1e-6)
    # The variance of a constant row is the squared rounding error of its mean.
    varied = ["constant" not in name for name in groups]
    values -= mean[:, None]
  else:
    varied = [True for _ in groups]
  rstd = 1 / np.sqrt((values**2).mean(axis=1) + EPS)
  # The interpreter adds up to 512 equal values one after the other. Each sum
  # rounds by at most 2^-24, and the root halves the error.
  np.testing.assert_allclose(
    actual[1].rstd[np.array(varied)], rstd[varied], rtol=256 * 2.0**-24
  )


def test_norm_input_kernel_propagates_nan():
  x = np.concatenate([[g] for g in cases.nonfinite_groups(1024).values()])
  x = jnp.asarray(np.concatenate([x, cases.activations((5, 1024))]))
  _, _, _, options = inputs((1, 1024), "rms")
  actual = interpret(norm.norm_input, x, None, None, **options)
  expected = run(ops.norm_input.definition, x, None, None, **options)
  assert_same_groups(actual[0], expected[0])
  assert_same_stats(actual[1], expected[1])
  assert np.isnan(actual[2]) and np.isnan(expected[2])


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize(
  "shape, kind, group_size",
  [((80, 144), "layer", 16), ((48, 256), "rms", 128)],
  ids=str,
)
def test_norm_kernel_matches_definition(shape, kind, group_size, layout):
  # The first shape is not a multiple of a tile, and the second has tiles of 32
  # rows.
  x, gamma, beta, options = inputs(shape, kind, group_size=group_size)
  x_q, stats, scale = run(ops.norm_input.definition, x, gamma, beta, **options)
  # Make some values exceed qmax.
  args, options = (x_q, gamma, beta, stats), dict(scale=scale * 0.8)
  actual = interpret(norm.norm_fwd, *args, **options, layout=layout)
  expected = run(ops.norm_fwd.definition, *args, **options, layout=layout)
  assert_same_operand(actual, expected, 0.999)


def test_norm_kernel_without_gamma_or_beta():
  x, _, _, options = inputs((32, 128), "layer")
  x_q, stats, scale = run(ops.norm_input.definition, x, None, None, **options)
  args = x_q, None, None, stats
  actual = interpret(norm.norm_fwd, *args, scale=scale)
  expected = run(ops.norm_fwd.definition, *args, scale=scale)
  assert_same_operand(actual, expected, 0.999)


@pytest.mark.parametrize("registers", ["row and sums", "sums", "neither"])
@pytest.mark.parametrize(
  "shape, group_size, kind",
  [((9, 1024), 16, "rms"), ((2, 5, 1152), 128, "layer")],
  ids=str,
)
def test_norm_backward_kernel_matches_definition(
  shape, group_size, kind, registers, monkeypatch
):
  # Of four programs, some process two rows and some process three.
  dy, x_q, gamma, stats = gradients(shape, kind, group_size)
  add = jnp.asarray(cases.activations(shape))
  args, options = (dy, x_q, gamma, stats), dict(dtype=F32, add=add)
  kernel, share = (
    norm_backward.norm_bwd,
    norm_backward.Share(4, ahead="row" in registers, sums="sums" in registers),
  )
  kernel = with_tile(monkeypatch, kernel, "pick_share", share)
  actual = kernel(*args, **options, interpret=True)
  expected = run(ops.norm_bwd.definition, *args, **options)
  # The sums have at most 1152 terms in f32.
  assert_close(actual, expected, 2e-6)


def test_norm_backward_kernel_in_bf16_without_gamma_or_add():
  dy, x_q, _, stats = gradients((3, 1040), "layer", dtype=F32)
  actual = interpret(norm_backward.norm_bwd, dy, x_q, None, stats)
  expected = run(ops.norm_bwd.definition, dy, x_q, None, stats)
  assert actual[0].dtype == BF16
  # If f32 values differ in their last bits, BF16 values may differ by one ulp.
  np.testing.assert_allclose(
    actual[0].astype(F32), expected[0].astype(F32), rtol=2.0**-7, atol=1e-7
  )
  assert_close(actual[1:], expected[1:], 2e-6)


@pytest.mark.parametrize(
  "width, group_size, reason",
  [
    (240, 16, "rows of 256 to 8192 values, got 240"),
    (384, 128, "rows of 512 to 8192 values, got 384"),
    (8208, 16, "rows of 256 to 8192 values, got 8208"),
    (1040, 32, "multiple of the group size 32, got 1040"),
    (1020, 12, "got 12"),
  ],
)
def test_norm_kernels_refuse_unsupported_widths(width, group_size, reason):
  x = jnp.zeros((2, width))
  x_q = QTensor(x.astype(E4M3), jnp.zeros((2, width // group_size)), group_size)
  with refused(reason):
    norm.norm_input(
      x, None, None, kind="rms", eps=EPS, groups=Groups(group_size)
    )
  with refused(reason):
    norm_backward.norm_bwd(x, x_q, None, NormStats(None, x[:, 0]))


def specs(m, n, kind, group_size=16):
  """Returns the shapes of x, quantized x, gamma, beta and statistics."""
  spec = jax.ShapeDtypeStruct
  row, vector = spec((m,), F32), spec((n,), F32)
  scale = spec((m, n // group_size), BF16)
  x_q = QTensor(spec((m, n), E4M3), scale, group_size)
  is_layer = kind == "layer"
  stats = NormStats(row if is_layer else None, row)
  return spec((m, n), BF16), x_q, vector, vector if is_layer else None, stats


@pytest.mark.parametrize(
  "n, kind, group_size",
  [
    (272, "rms", 16),
    (640, "layer", 128),
    # Each slow case takes a second or two.
    pytest.param(768, "rms", 64, marks=pytest.mark.slow),
    pytest.param(1152, "layer", 128, marks=pytest.mark.slow),
    pytest.param(6656, "layer", 32, marks=pytest.mark.slow),
    pytest.param(8192, "rms", 16, marks=pytest.mark.slow),
  ],
)
def test_norms_lower_for_a_gpu(n, kind, group_size):
  x, x_q, gamma, beta, stats = specs(64, n, kind, group_size)

  def both(x, x_q, gamma, beta, stats):
    options = dict(kind=kind, eps=EPS, groups=Groups(group_size))
    made = norm.norm_input(x, gamma, beta, **options)
    return made, norm_backward.norm_bwd(x, x_q, gamma, stats, add=x)

  text = lowered_for_h200(both, x, x_q, gamma, beta, stats)
  assert text.count("@mosaic_gpu") == 3  # Including the kernel for the scale.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "shape", [(4096, 4096), (1008, 1152), (512, 768), (256, 8192)], ids=str
)
def test_norm_kernels_on_a_gpu(shape, kind):
  check_kernels(shape, kind, 0.9999)
  dy, x_q, gamma, stats = gradients(shape, kind)
  args = dict(add=dy, dtype=F32)
  assert_close(
    norm_backward.norm_bwd(dy, x_q, gamma, stats, **args),
    run(ops.norm_bwd.definition, dy, x_q, gamma, stats, jit=jax.jit, **args),
  )


def check_kernels(shape, kind, share, group_size=16):
  """Compares compiled kernels with their definitions."""
  x, _, _, options = inputs(shape, kind, group_size=group_size)
  gamma, beta = vectors(kind, shape[-1])
  expected = run(
    ops.norm_input.definition, x, gamma, beta, jit=jax.jit, **options
  )
  actual = norm.norm_input(x, gamma, beta, **options)
  assert_same_codes(actual[0].qvalue, expected[0].qvalue, share)
  same = np.asarray(actual[0].qvalue == expected[0].qvalue).all(axis=-1)
  np.testing.assert_array_equal(actual[0].scale, expected[0].scale)
  for a, e in zip(actual[1], expected[1], strict=True):
    assert (a is None) == (e is None)
    if e is not None:
      np.testing.assert_allclose(a[same], e[same], rtol=1e-6)
  np.testing.assert_allclose(actual[2], expected[2], rtol=1e-4)
  x_q, stats, scale = expected
  args = dict(scale=scale, layout="both")
  actual = norm.norm_fwd(x_q, gamma, beta, stats, **args)
  expected = run(
    ops.norm_fwd.definition, x_q, gamma, beta, stats, jit=jax.jit, **args
  )
  assert_same_operand(actual, expected, 0.999)
