# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention multiplies FP8: errors, scales and what is saved."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import recipe as recipes
from coat_jax.formats import E4M3
from coat_jax.layers import (
  attention_output,
  dot_product_attention,
  fp8_attention,
)
from coat_jax.ops import AttentionKind, GradientScales
from tests.comparing import jit
from tests.layers import straight_through
from tests.matrices import quick
from tests.ops.naive_attention import naive_attention, seen

B, T, D, N, K, H = 2, 24, 32, 4, 2, 16
RECIPE = recipes.coat(attention="fp8", attention_compute="fp8")
BLOCK = recipes.fp8_block(attention="fp8", attention_compute="fp8")


def case():
  """x, q, k, v, w and dy."""
  rng = np.random.default_rng(0)
  shapes = (B, T, D), (B, T, N, H), (B, T, K, H), (B, T, K, H)
  shapes = (*shapes, (N * H, D), (B, T, D))
  return [jnp.float32(rng.normal(size=shape)) for shape in shapes]


def error(found, want):
  """Root of the mean square, relative."""
  found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
  return np.sqrt(np.mean((found - want) ** 2) / np.mean(want**2))


@pytest.mark.parametrize("times", quick(1, [1e-3, 1e3, 1.0]))
def test_guessed_scales_that_do_not_fit_are_found(times, monkeypatch):
  """By 1e-3 all gradients would be clipped, by 1e3 most would be 0."""
  guess = fp8_attention.guess_largest
  monkeypatch.setattr(
    fp8_attention,
    "guess_largest",
    lambda *args: GradientScales(*(times * x for x in guess(*args))),
  )
  _, q, k, v, *_ = case()
  dout = jnp.sin(7 * q)
  # Another function: what was traced before had another guess.
  attend = lambda *args: dot_product_attention(*args, recipe=RECIPE)  # noqa: E731
  run = lambda f, g: (lambda out, vjp: (out, *vjp(g)))(*jax.vjp(f, q, k, v))  # noqa: E731
  found = jit(lambda: run(attend, dout))()
  mask = seen(T, T, AttentionKind())
  naive = functools.partial(naive_attention, mask=mask, scale=H**-0.5, cap=None)
  want = jit(lambda: run(lambda *args: naive(*args)[0], dout))()
  # A code is off by 2^-4 at most, 2.6 % in the mean, and each is a sum of
  # products of two codes, rounded once more; dS and delta cancel.
  for x, y in zip(found, want, strict=True):
    assert 0.01 < error(x, y) < 0.1


@pytest.mark.slow
def test_a_gradient_of_zeros_has_gradients_of_zeros():
  _, q, k, v, *_ = case()

  @jit
  def gradients(q, k, v):
    attend = functools.partial(dot_product_attention, recipe=RECIPE)
    return jax.vjp(attend, q, k, v)[1](jnp.zeros_like(q))

  for x in gradients(q, k, v):
    np.testing.assert_array_equal(x, 0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, BLOCK], ids=lambda r: r.name)
def test_codes_that_products_read_are_what_is_saved(recipe):
  *args, dy = case()
  run = functools.partial(attention_output, recipe=recipe)

  @jit
  def layer(*args):
    y, vjp = jax.vjp(run, *args)
    return y, vjp(dy), [x for x in jax.tree.leaves(vjp) if x.ndim]

  y, gradients, saved = layer(*args)
  wide = {x.shape for x in args} | {dy.shape}
  kinds = collections.Counter(
    (x.dtype, x.shape) for x in saved if x.dtype == E4M3 or x.shape not in wide
  )
  codes = jnp.dtype(E4M3)
  want: dict = {(codes, (B, T, N, H)): 2, (codes, (B, T, K, H)): 2}
  want[jnp.dtype(jnp.float32), (B, T, N)] = 1  # log-sum-exp
  assert {key: n for key, n in kinds.items() if len(key[1]) > 2} == want

  # Beside attention to exact values with the same projection.
  @jit
  def exact(*args):
    f = functools.partial(
      straight_through.attention_output, bias=None, kept="bf16"
    )
    y, vjp = jax.vjp(f, *args)
    return y, vjp(dy)

  want_y, want_gradients = exact(*args)
  assert 0.005 < error(y, want_y) < 0.08
  for name, x, want in zip("xqkvw", gradients, want_gradients, strict=True):
    assert error(x, want) < 0.15, name
