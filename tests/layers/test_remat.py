# SPDX-License-Identifier: Apache-2.0
"""Tests fp8_remat: which arrays it saves, and its gradients.

Gradients are compared with those of `jax.vjp` at arguments rounded by NumPy.
"""

import collections
import dataclasses
import doctest

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  block_inputs_saveable,
  fp8_remat,
  remat,
)
from coat_jax.recipes import MeshAxes
from tests import oracles
from tests.comparing import assert_close, assert_same_bits, jit

B, T, D = 4, 6, 40  # The last group of 16 is short.
XLA = recipes.coat(implementation="xla")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, T, D)).astype(np.float32)
W = RANDOM.normal(0, D**-0.5, size=(D, D)).astype(np.float32)
BIAS = RANDOM.normal(size=(1, 1, D)).astype(np.float32)
DY = RANDOM.normal(size=(B, T, D)).astype(np.float32)


def rounded(x, group_size=16):
  """Quantizes x in groups, and dequantizes it."""
  rows = np.asarray(x, np.float32).reshape(-1, x.shape[-1])
  codes, scales = oracles.quantize(
    rows, group_size, scale_dtype=ml_dtypes.bfloat16
  )
  scales = np.asarray(scales, np.float32).repeat(group_size, 1)
  scales = scales[:, : rows.shape[1]]
  values = codes.view(oracles.E4M3).astype(np.float32) * scales
  return values.reshape(x.shape).astype(x.dtype)


def f(x, w):
  return x + jnp.tanh(x @ w + 0.5)


def gradients(f, *args):
  def both(*args):
    y, backward = jax.vjp(f, *args)
    return y, backward(jnp.asarray(DY, y.dtype))

  return jit(both)(*args)


def kept(f, *args):
  """Counts the saved arrays of each dtype and shape."""
  residuals = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
  leaves = jax.tree.leaves(residuals)
  return collections.Counter((str(x.dtype), x.shape) for x in leaves)


@pytest.mark.parametrize(
  "dtype, group_size, prevent_cse",
  [(np.float32, 16, True), (ml_dtypes.bfloat16, 8, False)],
)
def test_gradients_match_those_at_the_rounded_argument(
  dtype, group_size, prevent_cse
):
  recipe = recipes.coat(implementation="xla", group_size=group_size)
  saving = fp8_remat(f, recipe=recipe, prevent_cse=prevent_cse)
  x, w = X.astype(dtype), W.astype(dtype)
  found = gradients(saving, x, w)
  assert_same_bits(found, gradients(f, rounded(x, group_size), w))


def test_saved_arrays_are_codes_scales_and_other_arguments():
  x = X.astype(ml_dtypes.bfloat16)
  assert kept(fp8_remat(f, recipe=XLA), x, W) == {
    ("uint8", (B, T, D)): 1,
    ("bfloat16", (B, T, 3)): 1,
    ("float32", (D, D)): 1,
  }


def test_closed_over_arrays_get_gradients():
  def closing(f_of, x, w, bias):
    def layer(x):
      return jnp.tanh(x @ w + bias) * jnp.sum(bias)

    return f_of(layer)(x)

  saving = lambda *args: closing(lambda f: fp8_remat(f, recipe=XLA), *args)  # noqa: E731
  plain = lambda *args: closing(lambda f: f, *args)  # noqa: E731
  found = gradients(saving, X, W, BIAS)
  assert_close(found, gradients(plain, rounded(X), W, BIAS), 1e-6)
  assert kept(saving, X, W, BIAS)["uint8", (B, T, D)] == 1
  assert not kept(saving, X, W, BIAS)["float32", (B, T, D)]


def test_arguments_may_be_trees_and_argnums_negative():
  def of_trees(streams, w, other, *, power):
    a, b, scale, steps = streams["a"], streams["b"], streams["s"], streams["n"]
    return (a @ w) * scale + b**power * steps + jnp.sin(other) * a

  streams = {
    "a": X,
    "b": DY,
    "s": np.float32(1.1),
    "n": np.full((B, T, 1), 3, np.int32),
  }
  saving = fp8_remat(of_trees, argnums=(0, -1), recipe=XLA)

  def power(f):
    return lambda a, b, s, w, other: f(
      streams | {"a": a, "b": b, "s": s}, w, other, power=3
    )

  args = (X, DY, streams["s"], W, 2 * X)
  exact = (rounded(X), rounded(DY), streams["s"], W, rounded(2 * X))
  found = gradients(power(saving), *args)
  assert_close(found, gradients(power(of_trees), *exact), 1e-6)
  arrays = kept(power(saving), *args)
  assert arrays["uint8", (B, T, D)] == 3
  assert not arrays["float32", (B, T, D)]


def test_each_step_of_a_scan_rounds_its_carry():
  weights = np.stack([W, -W.T, W @ W])

  def scanned(f):
    def loop(x, weights):
      step = lambda x, w: (f(x, w), None)  # noqa: E731
      return jax.lax.scan(step, x, weights)[0]

    return loop

  saving = scanned(fp8_remat(f, recipe=XLA, prevent_cse=False))
  # Run the loop forward, then backward with plain autodiff of each step.
  x, steps = X, []
  for w in weights:
    x, backward = jax.vjp(f, rounded(np.asarray(x)), w)
    steps.append(backward)
  g, dweights = DY, []
  for backward in reversed(steps):
    g, dw = backward(g)
    dweights.insert(0, dw)
  found = gradients(saving, X, weights)
  assert_close(found, (x, (g, jnp.stack(dweights))), 1e-5)
  arrays = kept(saving, X, weights)
  assert arrays["uint8", (3, B, T, D)] == 1
  assert arrays["bfloat16", (3, B, T, 3)] == 1
  assert not arrays["float32", (3, B, T, D)]


def test_largest_codes_stay_finite_and_nan_stays_in_its_group():
  # Use codes from 256 to 448, which would be NaN in a format with infinities.
  x = X.copy()
  x[..., :16] = np.linspace(256, 448, 16)
  saving = fp8_remat(f, recipe=XLA)
  y, (dx, dw) = gradients(saving, x, W)
  assert_same_bits((y, (dx, dw)), gradients(f, rounded(x), W))
  assert np.isfinite(dw).all()
  x[0, 0, 0] = np.nan
  values = jit(fp8_remat(lambda x: 1 * x, recipe=XLA))(x)
  inside = np.zeros(x.shape, bool)
  inside[0, 0, :16] = True
  assert np.isnan(values[0, 0, 0])
  np.testing.assert_array_equal(np.isnan(values) & ~inside, False)


@pytest.mark.parametrize("is_explicit", [False, True])
def test_fp8_remat_on_a_mesh_needs_no_all_gather(is_explicit):
  kind = (AxisType.Explicit if is_explicit else AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=kind)
  axes = None if is_explicit else MeshAxes()
  recipe = dataclasses.replace(XLA, axes=axes)
  tokens = NamedSharding(mesh, P(("data", "fsdp")))

  def g(x, w):
    return x + jnp.tanh(x * w)

  w = W[:1, None]
  want = gradients(g, rounded(X), w)
  saving = fp8_remat(g, recipe=recipe)
  with jax.set_mesh(mesh):
    x, dy = (jax.device_put(a, tokens) for a in (X, DY))

    def both(x, w, dy):
      y, backward = jax.vjp(saving, x, w)
      return y, backward(dy)

    found = jit(both)(x, w, dy)
    program = jit(both).lower(x, w, dy).compile().as_text()
  assert_close(found, want, 1e-6)
  assert "all-gather" not in program


@pytest.mark.parametrize("norm", [None, "rms"])
def test_block_inputs_include_those_of_post_norms(norm):
  options = dict(norm=norm, post_norm="rms", recipe=XLA)
  layer = MLP(D, 96, dtype=jnp.float32, rngs=nnx.Rngs(0), **options)
  graph, params = nnx.split(layer)

  def plain(params, x):
    return nnx.merge(graph, params)(x)

  saving = jax.checkpoint(plain, policy=block_inputs_saveable)
  assert_same_bits(gradients(saving, params, X), gradients(plain, params, X))
  found = kept(saving, params, X)
  num_norms = 1 if norm is None else 2
  assert found["uint8", (B, T, D)] == num_norms
  assert found["float32", (B, T)] == num_norms
  # Without a first norm, the block's matmul reads the input itself.
  assert found["float32", (B, T, D)] == (1 if norm is None else 0)
  # The backward pass repeats only the first matmul: 2 + 1 + 4 matmuls in all.
  f = jit(lambda *args: jax.vjp(saving, *args)[1](jnp.asarray(DY)))
  products = f.lower(params, X).as_text().count("stablehlo.dot_general")
  assert products == 2 + 1 + 4


def test_argnums_out_of_range_are_refused():
  with pytest.raises(ValueError, match="argnums .2,. must be indices .* got 2"):
    fp8_remat(f, argnums=2)(X, W)


@pytest.mark.slow
def test_docstring_examples_pass():
  assert doctest.testmod(remat).failed == 0
