# SPDX-License-Identifier: Apache-2.0
"""Clipping by earlier norms, against the rule in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import Clipping
from coat_jax.optimizer.clipping import clip_gradients

MAX, RELATIVE, DECAY, WARMUP = 1.0, 1.05, 0.9, 4


def gradients(step):
  """Two slices of a stacked leaf and one of another; step 6 has a spike."""
  rng = np.random.default_rng(step)
  a, b = rng.normal(size=(3,)), rng.normal(size=(2, 4))
  b[1] *= 50 if step == 6 else 1
  big = 2.0 if step < 2 else 0.2
  return {
    "a": (big * a).astype("float32"),
    "layers": {"b": (0.2 * b).astype("float32")},
  }


def scales_in_numpy(rule, steps):
  """The scale of each slice at each step, from the paper's algorithm."""
  own, before, out = np.zeros(3), None, []
  for step in range(steps):
    g = gradients(step)
    slices = [g["a"], *g["layers"]["b"]]
    norms = np.array([np.linalg.norm(x.astype("float64")) for x in slices])
    if before is None:
      scale = np.minimum(1, MAX / norms)
    else:
      scale = np.full(3, min(1, MAX / before))
    if rule == "adaptive":
      if step >= WARMUP:
        scale = np.minimum(1, RELATIVE * own / norms)
        own = DECAY * own + (1 - DECAY) * scale * norms
      else:
        clipped = scale * norms
        own = clipped if before is None else np.minimum(own, clipped)
    before = np.sqrt(np.sum(norms**2))
    out.append((scale, before))
  return out


@pytest.mark.parametrize("rule", ["previous", "adaptive"])
def test_scales_are_those_of_the_rule(rule):
  clip = Clipping(rule, MAX, relative=RELATIVE, decay=DECAY, warmup=WARMUP)
  state = clip.init(gradients(0), stack="layers")
  for step, (scale, norm) in enumerate(scales_in_numpy(rule, 9)):
    grads = gradients(step)
    clipped, state, found = clip_gradients(clip, state, grads)
    np.testing.assert_allclose(clipped["a"], grads["a"] * scale[0], rtol=1e-5)
    expected = grads["layers"]["b"] * scale[1:, None]
    np.testing.assert_allclose(clipped["layers"]["b"], expected, rtol=1e-5)
    np.testing.assert_allclose(found, norm, rtol=1e-5)
    assert int(state.steps) == step + 1
  assert bool(jax.tree.leaves(state.own)) == (rule == "adaptive")


def test_a_spike_is_clipped_at_once_by_the_adaptive_rule_alone():
  scales = {
    rule: scales_in_numpy(rule, 9)[6][0][2] for rule in ("previous", "adaptive")
  }
  assert scales["previous"] == 1 and scales["adaptive"] < 0.05


def test_norm_that_is_not_finite_is_not_hidden():
  clip = Clipping("adaptive", 1.0)
  grads = {"a": jnp.array([jnp.nan])}
  state = clip.init(grads, stack="layers")
  clipped, _, norm = clip_gradients(clip, state, grads, stack="layers")
  assert np.isnan(clipped["a"]).all() and np.isnan(norm)


def test_gradients_of_zeros_stay_zeros():
  clip = Clipping("adaptive", 1.0, warmup=1)
  grads = {"a": jnp.zeros(3)}
  state = clip.init(grads, stack="layers")
  for _ in range(3):
    clipped, state, _ = clip_gradients(clip, state, grads, stack="layers")
    np.testing.assert_array_equal(clipped["a"], 0)
