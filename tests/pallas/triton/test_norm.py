# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's norms with their definitions: `norm` and `norm_backward`.

Codes and scales of the input must be equal. The kernels add up rows in another
order than XLA. So statistics, the output's scale and gradients agree to f32's
rounding of such sums, and most codes that follow from them are equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.ops.types import NormStats
from coat_jax.pallas.triton import norm, norm_backward
from coat_jax.pallas.triton.matrix import Tile
from tests import cases
from tests.comparing import assert_close, jit
from tests.pallas.kernels import (
  assert_same_codes,
  assert_same_groups,
  assert_same_operand,
  refused,
  with_tile,
)

BF16, F32 = jnp.bfloat16, jnp.float32
EPS = 1e-5


def run(fn, *args, jit=jit, **options):
  """Compiles and runs `fn`; `scale` and `add` are arrays, not constants."""
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
  # Far from zero: a masked column in a mean or a variance would show.
  x = jnp.asarray(cases.activations(shape) + 7, dtype)
  gamma, beta = vectors(kind, shape[-1])
  options = dict(kind=kind, eps=EPS, groups=Groups(group_size))
  return x, gamma, beta, options


def assert_same_stats(actual, expected):
  for a, e in zip(actual, expected, strict=True):
    assert (a is None) == (e is None)
    if e is not None:
      # n sums of f32 in pairs: log2(n) roundings of 2^-24, squared for rstd.
      np.testing.assert_allclose(a, e, rtol=1e-6)


@pytest.mark.parametrize("given", ["gamma", "beta", "neither"])
def test_norm_input_kernel_without_gamma_or_beta(given, monkeypatch):
  # In three tiles of rows, the last one of which has one row. So far from
  # zero that what is masked, 0 - mean, would be the largest of y.
  _, gamma, beta, options = inputs((9, 176), "layer")
  x = jnp.asarray(1000 + 100 * np.random.default_rng(0).normal(size=(9, 176)))
  gamma = gamma.astype(BF16) if given == "gamma" else None
  beta = beta if given == "beta" else None
  kernel, tile = norm.norm_input, norm.RowTile(4, 1)
  kernel = with_tile(monkeypatch, kernel, "pick_input_tile", tile)
  _, stats, scale = kernel(x, gamma, beta, **options, interpret=True)
  wanted = run(ops.norm_input.definition, x, gamma, beta, **options)
  assert_same_stats(stats, wanted[1])
  np.testing.assert_allclose(scale, wanted[2], rtol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_input_kernel_of_degenerate_rows(kind):
  groups = cases.finite_groups(48)
  # Their squares overflow, and their squares' means underflow, in any order.
  for name in ("largest", "huge_ratio", "large"):
    del groups[name]
  x, options = np.stack(list(groups.values())), inputs((1, 48), kind)[-1]
  actual = interpret(norm.norm_input, jnp.asarray(x), None, None, **options)
  expected = run(
    ops.norm_input.definition, jnp.asarray(x), None, None, **options
  )
  assert_same_groups(actual[0], expected[0])
  if kind == "layer":
    # A constant's variance is the rounding of its mean, squared.
    assert_close(actual[1].mean, expected[1].mean, 1e-6)
    varied = [i for i, name in enumerate(groups) if "constant" not in name]
    np.testing.assert_allclose(
      actual[1].rstd[np.array(varied)],
      expected[1].rstd[np.array(varied)],
      rtol=1e-6,
    )
  else:
    assert_same_stats(actual[1], expected[1])


def test_norm_input_kernel_of_nan():
  x = np.concatenate([[g] for g in cases.nonfinite_groups(48).values()])
  x = np.concatenate([x, cases.activations((5, 48))])
  _, _, _, options = inputs((1, 48), "rms")
  actual = interpret(norm.norm_input, jnp.asarray(x), None, None, **options)
  expected = run(
    ops.norm_input.definition, jnp.asarray(x), None, None, **options
  )
  assert_same_groups(actual[0], expected[0])
  assert_same_stats(actual[1], expected[1])
  assert np.isnan(actual[2]) and np.isnan(expected[2])


@pytest.mark.parametrize("down", [True, False])
def test_norm_kernel_without_gamma_or_beta(down, monkeypatch):
  x, _, _, options = inputs((48, 80), "layer")
  x_q, stats, scale = run(ops.norm_input.definition, x, None, None, **options)
  scale = scale * 0.8  # Some values beyond qmax.
  args, options = (x_q, None, None, stats), dict(scale=scale, layout="both")
  tile = Tile(32, 32, 1, down)
  kernel = with_tile(monkeypatch, norm.norm_fwd, "pick_tile", tile)
  actual = kernel(*args, **options, interpret=True)
  expected = run(ops.norm_fwd.definition, *args, **options)
  assert_same_operand(actual, expected, 0.999)


def gradients(shape, kind, group_size=16, dtype=BF16):
  x, gamma, beta, options = inputs(shape, kind, group_size=group_size)
  x_q, stats, _ = run(ops.norm_input.definition, x, gamma, beta, **options)
  dy = jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)
  return dy, x_q, gamma, stats


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "shape, group_size, chunk",
  [
    ((5, 48), 16, (4, 3, 1, True)),
    # A whole number of tiles, but not of chunks; then neither.
    ((32, 176), 16, (4, 3, 1, True)),
    ((32, 176), 16, (4, 3, 1, False)),
    ((2, 9, 688), 16, (4, 2, 1, True)),
    ((4, 256), 128, (1, 4, 1, False)),
  ],
  ids=str,
)
def test_norm_backward_kernel_in_chunks_matches_definition(
  shape, group_size, chunk, kind, monkeypatch
):
  dy, x_q, gamma, stats = gradients(shape, kind, group_size)
  add = jnp.asarray(cases.activations(shape))
  args, options = (dy, x_q, gamma, stats), dict(dtype=F32, add=add)
  kernel, chunk = norm_backward.norm_bwd, norm_backward.Chunk(*chunk)
  kernel = with_tile(monkeypatch, kernel, "pick_chunk", chunk)
  actual = kernel(*args, **options, interpret=True)
  expected = run(ops.norm_bwd.definition, *args, **options)
  # Sums of at most 688 terms of f32.
  assert_close(actual, expected, 2e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_backward_kernel_in_bf16_without_gamma_or_add(kind):
  dy, x_q, _, stats = gradients((3, 176), kind, dtype=F32)
  actual = interpret(norm_backward.norm_bwd, dy, x_q, None, stats)
  expected = run(ops.norm_bwd.definition, dy, x_q, None, stats)
  assert actual[0].dtype == BF16
  # One ulp of BF16 where f32 differs in its last bits.
  np.testing.assert_allclose(
    actual[0].astype(F32), expected[0].astype(F32), rtol=2.0**-7, atol=1e-7
  )
  assert_close(actual[1:], expected[1:], 2e-6)


@pytest.mark.parametrize("n", [16, 48, 1024, 4096, 5120, 6656, 8192])
def test_norm_tiles_are_powers_of_two_and_partial_sums_few(n):
  for m in (1, 100, 8192, 65536):
    tile, chunk = norm.pick_input_tile(n), norm_backward.pick_chunk(m, n)
    for number in (tile.rows, tile.warps, chunk.rows, chunk.warps):
      assert number & (number - 1) == 0 and number >= 1
    assert max(tile.warps, chunk.warps) <= 32
    assert -(-m // (chunk.rows * chunk.steps)) <= 264


@pytest.mark.parametrize(
  "shape, group_size, reason",
  [
    ((2, 8208), 16, "at most 8192, got 8208"),
    ((2, 48), 32, "multiple of the group size 32 .* got 48"),
    ((2, 48), 12, "got 12"),
  ],
  ids=str,
)
def test_norm_kernels_refuse(shape, group_size, reason):
  x = jnp.zeros(shape)
  x_q = QTensor(x.astype(jnp.float8_e4m3fn), x[:, :1], group_size)
  stats = NormStats(None, x[:, 0])
  with refused(reason):
    norm.norm_input(
      x, None, None, kind="rms", eps=EPS, groups=Groups(group_size)
    )
  with refused(reason):
    norm_backward.norm_bwd(x, x_q, None, stats)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(4096, 4096), (1008, 5120)], ids=str)
def test_norm_kernels_on_a_gpu(shape, kind):
  x, gamma, beta, options = inputs(shape, kind)
  x_q, stats, scale = run(
    ops.norm_input.definition, x, gamma, beta, jit=jax.jit, **options
  )
  made = norm.norm_input(x, gamma, beta, **options)
  assert_same_codes(made[0].qvalue, x_q.qvalue, 0.9999)
  same = np.asarray(made[0].qvalue == x_q.qvalue).all(axis=-1)
  np.testing.assert_allclose(made[1].rstd[same], stats.rstd[same], rtol=1e-6)
  np.testing.assert_allclose(made[2], scale, rtol=1e-4)
  args = dict(scale=scale, layout="both")
  actual = norm.norm_fwd(x_q, gamma, beta, stats, **args)
  expected = run(
    ops.norm_fwd.definition, x_q, gamma, beta, stats, jit=jax.jit, **args
  )
  assert_same_codes(actual.rows, expected.rows, 0.999)
  assert_same_codes(actual.columns, expected.columns, 0.999)
  dy = jnp.asarray(np.random.default_rng(1).normal(size=shape), BF16)
  args = dict(add=x, dtype=F32)
  assert_close(
    norm_backward.norm_bwd(dy, x_q, gamma, stats, **args),
    run(ops.norm_bwd.definition, dy, x_q, gamma, stats, jit=jax.jit, **args),
  )
