# SPDX-License-Identifier: Apache-2.0
"""Tests that finite gradients of any size give finite moments and updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import apply_updates, coat_adamw, codecs
from coat_jax.optimizer import fused_coat_adamw
from coat_jax.optimizer.state import stored_leaves
from coat_jax.optimizer.step import decode
from tests.matrices import quick

CODECS = {
  "coat": codecs.coat(),
  "coat_e8m0": codecs.coat_e8m0(),
  "log8": codecs.log8(),
  "fp8": codecs.fp8(),
  "coat_e5m2": codecs.coat(second="e5m2"),
  "coat_nearest": codecs.coat(rounding="nearest"),
  "coat_e8m0_nearest": codecs.coat_e8m0(rounding="nearest"),
  "fp8_nearest": codecs.fp8(rounding="nearest"),
  "bfloat16": codecs.bfloat16(),
  "float32": codecs.float32(),
}
# From the smallest subnormal number of f32 to almost its largest.
SIZES = np.geomspace(1e-45, 3e38, 128)
STEPS = 24


def gradients(dtype) -> jax.Array:
  """Makes finite gradients of STEPS steps: [STEPS, 6, 256].

  Row 0 contains values of one size, and row 1 of all sizes. Row 2 contains a
  huge value among tiny ones, and row 3 a tiny value among huge ones. Row 4
  contains huge values in every fifth step. Row 5 contains the dtype's limits.
  """
  rng = np.random.default_rng(0)
  out = np.zeros((STEPS, 6, 256))
  out[:, 0] = 7e20
  out[:, 1] = np.stack(
    [np.roll(np.tile(SIZES, 2), 5 * i) for i in range(STEPS)]
  )
  out[:, 2], out[:, 2, 7] = 1e-45, 3e38
  out[:, 3], out[:, 3, 7] = 3e38, 1e-45
  out[:, 4] = rng.normal(size=(STEPS, 256))
  out[::5, 4, ::9] = 3e38
  limits = jnp.finfo(dtype)
  out[:, 5] = np.where(
    np.arange(256) % 3, float(limits.max), float(limits.smallest_subnormal)
  )
  out *= np.where(rng.random((1, 6, 256)) < 0.5, -1, 1)
  top = float(limits.max)
  grads = jnp.asarray(np.clip(out, -top, top).astype(dtype))
  assert np.all(np.isfinite(np.asarray(grads, np.float64)))
  return grads


def everything(path, leaf):
  return True


def are_finite(tree):
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])


@functools.cache
def run(name, dtype, fused):
  """Returns whether parameters, updates and moments are finite at each step."""
  codec, kwargs = CODECS[name], {"quantize_mask": everything}
  if fused:
    optimizer = fused_coat_adamw(1e-3, codec=codec, **kwargs)
  else:
    optimizer = coat_adamw(1e-3, codec=codec, **kwargs)
  grads = gradients(dtype)
  top = float(jnp.finfo(dtype).max) / 4
  params = np.minimum(np.resize(SIZES, grads.shape[1:]), top).astype(dtype)
  params = jnp.asarray(params)

  def step(carry, g):
    params, state = carry
    if fused:
      new, state = optimizer.apply(g, state, params)
      adam, updates = state, new - params
    else:
      updates, state = optimizer.update(g, state, params)
      adam = state[0]
      new = apply_updates(params, updates, step=adam.count)
    [(stored, groups)] = stored_leaves(adam)
    decoded = decode(groups, stored)
    return (new, state), are_finite((new, updates, *decoded))

  scan = jax.jit(lambda carry: jax.lax.scan(step, carry, grads)[1])
  return np.asarray(scan((params, optimizer.init(params))))


CASES = [("coat", jnp.float32, True), ("log8", jnp.bfloat16, False)]
# All pairs of a codec and a dtype; the two optimizers alternate.
CASES += [
  case
  for i, name in enumerate(CODECS)
  for j, dtype in enumerate((jnp.float32, jnp.bfloat16, jnp.float16))
  if (case := (name, dtype, (i + j) % 2 == 0)) not in CASES
  # If fp8 rounds a second moment to zero, the update is m / eps, up to 1e8,
  # which f16 cannot represent.
  and not (dtype == jnp.float16 and name.startswith("fp8"))
]


@pytest.mark.parametrize("name, dtype, fused", quick(2, CASES))
def test_finite_gradients_give_finite_results(name, dtype, fused):
  finite = run(name, dtype, fused)
  assert finite.shape == (STEPS, 4)
  assert finite.all(), "parameters, updates, mu, nu"


@pytest.mark.parametrize("name", quick(1, CODECS))
def test_updates_stay_small_after_a_huge_gradient(name):
  solver = coat_adamw(1.0, weight_decay=0.0, codec=CODECS[name], b2=0.95)
  params = jnp.zeros((32, 128))
  draw = jax.random.normal(jax.random.key(0), (60, *params.shape))
  grads = draw.at[20, :, 3].set(7e20)

  def step(state, g):
    updates, state = solver.update(g, state, params)
    return state, jnp.max(jnp.abs(updates[:, 3]))

  largest = jax.jit(lambda s: jax.lax.scan(step, s, grads)[1])(
    solver.init(params)
  )
  # Adam's update is about 1 in the first steps, (1 - b1) / sqrt(1 - b2) = 0.45
  # at the spike, and smaller after it.
  assert np.all(np.asarray(largest) < 4)
  assert np.all(np.asarray(largest[40:]) < 1)


def test_infinite_gradients_make_only_their_updates_nonfinite():
  solver = coat_adamw(1e-3, quantize_mask=everything)
  params = jnp.zeros((4, 256))
  grads = jnp.ones((4, 256)).at[1, 3].set(jnp.inf).at[2, 200].set(-jnp.inf)
  updates, state = solver.update(grads, solver.init(params), params)
  bad = ~np.isfinite(np.asarray(updates))
  assert bad[1, 3] and bad[2, 200] and bad.sum() == 2
  guarded = optax.apply_if_finite(solver, 3)
  updates, state = guarded.update(grads, guarded.init(params), params)
  assert not np.any(updates) and state.notfinite_count == 1
