# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's norms with their definitions.

Codes and scales of the input must be equal. The kernels add up rows in another
order than XLA. So statistics and the output's scale agree to f32's rounding of
such sums, and most codes that follow from them are equal.
"""

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
from tests.comparing import assert_close
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  assert_same_operand,
  refused,
  with_tile,
)
from tests.pallas.triton.test_norm import (
  BF16,
  EPS,
  F32,
  assert_same_stats,
  gradients,
  inputs,
  interpret,
  run,
  vectors,
)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "shape, group_size", [((2, 3, 2048), 16), ((5, 1152), 128)], ids=str
)
def test_norm_input_kernel_matches_definition(shape, group_size, kind):
  # Rows of whole loads, and rows whose last load overlaps the first.
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


def test_norm_input_kernel_of_nan():
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
  # Tiles over both edges; then low ones with one group per row.
  x, gamma, beta, options = inputs(shape, kind, group_size=group_size)
  x_q, stats, scale = run(ops.norm_input.definition, x, gamma, beta, **options)
  # Some values beyond qmax.
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


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
  "shape, group_size, kind",
  [((9, 1024), 16, "rms"), ((2, 5, 1152), 128, "layer")],
  ids=str,
)
def test_norm_backward_kernel_matches_definition(
  shape, group_size, kind, ahead, monkeypatch
):
  # Some of four programs have two rows, some three.
  dy, x_q, gamma, stats = gradients(shape, kind, group_size)
  add = jnp.asarray(cases.activations(shape))
  args, options = (dy, x_q, gamma, stats), dict(dtype=F32, add=add)
  kernel, share = norm_backward.norm_bwd, norm_backward.Share(4, ahead)
  kernel = with_tile(monkeypatch, kernel, "pick_share", share)
  actual = kernel(*args, **options, interpret=True)
  expected = run(ops.norm_bwd.definition, *args, **options)
  # Sums of at most 1152 terms of f32.
  assert_close(actual, expected, 2e-6)


def test_norm_backward_kernel_in_bf16_without_gamma_or_add():
  dy, x_q, _, stats = gradients((3, 1040), "layer", dtype=F32)
  actual = interpret(norm_backward.norm_bwd, dy, x_q, None, stats)
  expected = run(ops.norm_bwd.definition, dy, x_q, None, stats)
  assert actual[0].dtype == BF16
  # One ulp of BF16 where f32 differs in its last bits.
  np.testing.assert_allclose(
    actual[0].astype(F32), expected[0].astype(F32), rtol=2.0**-7, atol=1e-7
  )
  assert_close(actual[1:], expected[1:], 2e-6)


def test_norm_backward_kernel_refuses_wide_rows():
  x = jnp.zeros((2, 5136))
  with refused("rows of 1024 to 5120, got 5136"):
    norm_backward.norm_bwd(
      x,
      QTensor(x.astype(E4M3), jnp.zeros((2, 321), BF16), 16),
      None,
      NormStats(None, x[:, 0]),
    )


@pytest.mark.parametrize("width", [768, 8208])
def test_norm_kernels_refuse(width):
  with refused(f"rows of 1024 to 8192, got {width}"):
    norm.norm_input(
      jnp.zeros((2, width)),
      None,
      None,
      kind="rms",
      eps=EPS,
      groups=Groups(16),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(4096, 4096), (1008, 1152)], ids=str)
def test_norm_kernels_on_a_gpu(shape, kind):
  check_kernels(shape, kind, 0.9999)
  dy, x_q, gamma, stats = gradients(shape, kind)
  args = dict(add=dy, dtype=F32)
  assert_close(
    norm_backward.norm_bwd(dy, x_q, gamma, stats, **args),
    run(ops.norm_bwd.definition, dy, x_q, gamma, stats, jit=jax.jit, **args),
  )


def check_kernels(shape, kind, share, dtype=BF16):
  """Compares kernels, not interpreted, with their definitions."""
  x, _, _, options = inputs(shape, kind, dtype)
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
