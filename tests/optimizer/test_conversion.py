# SPDX-License-Identifier: Apache-2.0
"""Tests conversion between optax's Adam state and ours during training."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import (
  codecs,
  encoded,
  scale_by_coat_lion,
  scale_by_coat_muon,
)
from coat_jax.optax_coat import coat_adamw, scale_by_coat_adam
from coat_jax.optimizer import conversion
from coat_jax.optimizer.conversion import from_plain_state, to_plain_state
from coat_jax.optimizer.report import state_report
from tests import cases
from tests.matrices import quick
from tests.optimizer.adam_states import from_adam


def problem():
  """Returns parameters and a least-squares loss on inputs of unequal scales."""
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (256, 64)) * jnp.logspace(-1, 0.5, 64)[None]
  y = x @ jax.random.normal(keys[1], (64, 64))
  params = {"w": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}

  def loss(params):
    return jnp.mean((x @ params["w"] + params["bias"][None] - y) ** 2)

  return params, loss


def train(solver, loss, params, opt_state, count):
  def step(carry, _):
    params, opt_state = carry
    grads = jax.grad(loss)(params)
    updates, opt_state = solver.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None

  run = jax.jit(lambda x: jax.lax.scan(step, x, length=count)[0])
  return run((params, opt_state))


@pytest.mark.parametrize("name", quick(1, ["coat", "log8"]))
def test_run_switches_to_adam_and_back(name):
  codec = getattr(codecs, name)()
  params, loss = problem()
  ours = coat_adamw(1e-2, b2=0.99, codec=codec)
  adam = optax.adamw(1e-2, b2=0.99)
  start = float(loss(params))
  want, _ = train(adam, loss, params, adam.init(params), 180)

  params, state = train(ours, loss, params, ours.init(params), 60)
  like, state = jax.eval_shape(lambda: state), to_plain_state(state)
  assert jax.tree.structure(state) == jax.tree.structure(adam.init(params))
  assert int(state[0].count) == 60
  params, state = train(adam, loss, params, state, 60)
  in_f32 = state[0]
  state = from_plain_state(state, like)
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(
    jax.typeof, ours.init(params)
  )
  error = state_report(state, reference=in_f32)["w"]
  # The gap between codes is at most 1/8 of a value, and smaller with k > 1.
  # The root mean square error of stochastic rounding is at most half a gap.
  assert 0 < error["mu"]["relative_error"] < 0.06
  assert 0 < error["nu"]["relative_error"] < 0.06
  params, state = train(ours, loss, params, state, 60)
  assert int(state[0].count) == 180
  # The losses differ by less than a twentieth of Adam's reduction of the loss.
  assert abs(loss(params) - loss(want)) < 0.05 * (start - loss(want))


def test_conversion_changes_no_moment():
  codec = codecs.coat()
  solver = scale_by_coat_adam(codec=codec)
  params = {"w": jnp.ones((64, 64)), "bias": jnp.ones(64)}
  grads = {"w": jnp.asarray(cases.moments((64, 64))[0]), "bias": jnp.ones(64)}
  _, state = solver.update(grads, solver.init(params))
  adam = to_plain_state(state)
  assert isinstance(adam, optax.ScaleByAdamState)
  exact = from_adam(adam, codecs.float32())
  # The next update is that of Adam with the decoded moments.
  got, _ = solver.update(grads, state)
  want, _ = optax.scale_by_adam().update(grads, adam)
  in_f32, _ = scale_by_coat_adam(codec=codecs.float32()).update(grads, exact)
  for other in (want, in_f32):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
        x, y, rtol=14 * 2.0**-23, atol=1e-7
      ),
      got,
      other,
    )
  # Encoding decoded values again gives the same codes.
  nearest = codecs.fp8(rounding="nearest")
  once = from_adam(adam, nearest)
  twice = from_adam(to_plain_state(once), nearest)
  np.testing.assert_array_equal(twice.mu.codes["w"], once.mu.codes["w"])
  np.testing.assert_array_equal(twice.nu.codes["w"], once.nu.codes["w"])


@pytest.mark.parametrize("name", ["coat", "log8"])
def test_conversion_and_back_keeps_codes_of_groups_with_the_same_statistics(
  name,
):
  codec = getattr(codecs, name)()
  adam = optax.ScaleByAdamState(
    jnp.int32(3), *({"w": jnp.asarray(x)} for x in cases.moments((64, 1024)))
  )
  once = from_adam(adam, codec)
  decoded = to_plain_state(once)
  twice = from_adam(decoded, codec)
  again = to_plain_state(twice)
  for moment in ("mu", "nu"):
    old, new = (
      [
        np.asarray(getattr(getattr(state, moment), part)["w"])
        for part in ("codes", "amax", "range")
      ]
      for state in (once, twice)
    )
    same = (old[1] == new[1]) & (old[2] == new[2])
    # In the other groups, rounding changed the smallest value, and with it the
    # values of all codes.
    assert 0.2 < same.mean() < 1
    values = np.repeat(same, 128, axis=-1)
    changed = old[0].view(np.uint8)[values] != new[0].view(np.uint8)[values]
    # A decoded value may differ from its code by an f32 rounding error, so
    # noise may change the code.
    assert changed.mean() < 2e-4
    # Values change by much less than the gap between codes, which is up to an
    # eighth of a value.
    x, y = (
      np.asarray(getattr(state, moment)["w"]) for state in (decoded, again)
    )
    assert np.linalg.norm(y - x) < 0.03 * np.linalg.norm(x)


def test_plain_state_shares_no_buffer_with_the_state():
  # The schedule's count is not part of our states.
  optimizer = coat_adamw(optax.constant_schedule(1e-3))
  params = {"w": jnp.ones((64, 64))}
  state = jax.jit(optimizer.init)(params)
  plain = to_plain_state(state)
  jax.jit(optimizer.update, donate_argnums=1)(params, state, params)
  assert any(x.is_deleted() for x in jax.tree.leaves(state))
  assert not any(x.is_deleted() for x in jax.tree.leaves(plain))


def test_conversions_refuse_unknown_states():
  params = {"w": jnp.ones((64, 64))}
  state = coat_adamw(1e-3).init(params)
  with pytest.raises(ValueError, match="must contain an EncodedState"):
    to_plain_state(optax.adam(1e-3).init(params))
  with pytest.raises(ValueError, match="must have a ScaleByAdamState"):
    from_plain_state(state, state)
  stacked = jax.vmap(coat_adamw(1e-3).init)({"w": jnp.ones((2, 64, 64))})
  with pytest.raises(ValueError, match="under jax.vmap too"):
    from_plain_state(to_plain_state(stacked), stacked)


@pytest.mark.parametrize(
  ("optimizer", "other", "wanted"),
  [
    (scale_by_coat_adam(), optax.scale_by_adam(), "ScaleByCoatAdamState"),
    (scale_by_coat_lion(), optax.scale_by_lion(), "ScaleByCoatLionState"),
    (scale_by_coat_lion(), scale_by_coat_adam(), "ScaleByCoatLionState"),
    (scale_by_coat_muon(), optax.trace(0.9), "ScaleByCoatMuonState"),
    (encoded(optax.lion(1e-3)), optax.lion(1e-3), "EncodedState"),
  ],
)
def test_update_refuses_the_state_of_another_optimizer(
  optimizer, other, wanted
):
  params = {"w": jnp.ones((64, 64))}
  with pytest.raises(TypeError, match=f"must be an? {wanted}, .*from_plain"):
    optimizer.update(params, other.init(params), params)


def test_conversion_examples_run():
  assert not doctest.testmod(conversion).failed
