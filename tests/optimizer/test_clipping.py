# SPDX-License-Identifier: Apache-2.0
"""Compares clipping that depends on earlier norms with a NumPy version."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optimizer import Clipping
from coat_jax.optimizer.clipping import clip_gradients

MAX, RELATIVE, DECAY, WARMUP = 1.0, 1.05, 0.9, 4


def gradients(step):
  """Makes a plain gradient and a stack of two; step 6 has a spike."""
  rng = np.random.default_rng(step)
  a, b = rng.normal(size=(3,)), rng.normal(size=(2, 4))
  b[1] *= 50 if step == 6 else 1
  big = 2.0 if step < 2 else 0.2
  return {
    "a": (big * a).astype("float32"),
    "layers": {"b": (0.2 * b).astype("float32")},
  }


def scales_in_numpy(rule, steps):
  """Returns the scales of all slices, and the global norm, for each step."""
  own, before, mean, out = None, None, None, []
  for step in range(steps):
    g = gradients(step)
    slices = [g["a"], *g["layers"]["b"]]
    norms = np.array([np.linalg.norm(x.astype("float64")) for x in slices])
    if step == 0:
      limits = np.full(3, MAX)
    elif rule == "share" or step < WARMUP:
      limits = MAX * own / before
    else:
      limits = RELATIVE * mean
    scale = np.minimum(1, limits / norms)
    if step == WARMUP - 1:
      mean = scale * norms
    elif step >= WARMUP:
      mean = DECAY * mean + (1 - DECAY) * scale * norms
    own, before = norms, np.sqrt(np.sum(norms**2))
    out.append((scale, before))
  return out


@pytest.mark.parametrize("rule", ["share", "adaptive"])
def test_scales_follow_the_rule(rule):
  clip = Clipping(rule, MAX, relative=RELATIVE, decay=DECAY, warmup=WARMUP)
  state = clip.init(gradients(0))
  for step, (scale, norm) in enumerate(scales_in_numpy(rule, 9)):
    grads = gradients(step)
    clipped, state, found = clip_gradients(clip, state, grads)
    np.testing.assert_allclose(clipped["a"], grads["a"] * scale[0], rtol=1e-5)
    expected = grads["layers"]["b"] * scale[1:, None]
    np.testing.assert_allclose(clipped["layers"]["b"], expected, rtol=1e-5)
    np.testing.assert_allclose(found, norm, rtol=1e-5)
    assert int(state.steps) == step + 1


def test_share_keeps_the_global_norm_below_its_limit():
  clip = Clipping("share", 0.5)
  state = clip.init(gradients(0))
  for step in range(1, 9):
    clipped, state, norm = clip_gradients(clip, state, gradients(step))
    if step > 1:  # In the first step, no earlier norms are known.
      assert optax.tree.norm(clipped) <= 0.5 * (1 + 1e-5)
  assert norm > 0.5


@pytest.mark.parametrize("rule", ["share", "adaptive"])
def test_first_nonzero_gradient_below_max_norm_is_not_clipped(rule):
  clip = Clipping(rule, MAX, warmup=1)
  nothing, some = {"a": jnp.zeros(3)}, {"a": jnp.full(3, 0.1)}
  state = clip.init(nothing)
  for grads in (nothing, nothing, some):
    clipped, state, _ = clip_gradients(clip, state, grads)
    np.testing.assert_array_equal(clipped["a"], grads["a"])


def test_layers_of_several_stacks_are_clipped_separately():
  stacks = ("tower/layers", "decoder/layers")
  layers = np.float32([[0.3, 0.4], [3, 4]])
  grads = {
    "tower": {"layers": {"w": layers}},
    "decoder": {"layers": {"w": 2 * layers}},
  }
  clip = Clipping("share", MAX)
  state = clip.init(grads, stack=stacks)
  norms = np.array([0.5, 5, 1, 10])
  for limits in (np.ones(4), norms / np.linalg.norm(norms)):
    clipped, state, _ = clip_gradients(clip, state, grads, stack=stacks)
    own = [state.own[part]["layers"]["w"] for part in ("tower", "decoder")]
    np.testing.assert_allclose(np.concatenate(own), norms, rtol=1e-6)
    scales = np.minimum(1, limits / norms)[:, None]
    tower, decoder = (
      clipped[part]["layers"]["w"] for part in ("tower", "decoder")
    )
    np.testing.assert_allclose(tower, layers * scales[:2], rtol=1e-5)
    np.testing.assert_allclose(decoder, 2 * layers * scales[2:], rtol=1e-5)


@pytest.mark.parametrize("rule", ["share", "adaptive"])
@pytest.mark.parametrize("size", [3e19, 3e38])
def test_finite_gradients_of_any_size_give_finite_results(rule, size):
  clip = Clipping(rule, 2.0, warmup=2)
  ordinary = {"a": jnp.full(3, 1.0), "layers": {"b": jnp.full((2, 4), 0.5)}}
  # The spike is in the first step, the last step of the warmup, or after it.
  for spike in range(4):
    state = clip.init(ordinary)
    for step in range(6):
      factor = size if step == spike else 1
      grads = {
        "a": factor * ordinary["a"],
        "layers": {"b": ordinary["layers"]["b"].at[1].multiply(factor)},
      }
      clipped, state, norm = clip_gradients(clip, state, grads)
      for x in jax.tree.leaves((clipped, state)):
        assert np.all(np.isfinite(x)), (spike, step)
      leaves = [np.asarray(x, "float64") for x in jax.tree.leaves(grads)]
      exact = np.sqrt(sum(np.sum(x**2) for x in leaves))
      largest = np.finfo("float32").max
      np.testing.assert_allclose(norm, min(exact, largest), rtol=1e-6)
      if rule == "share" and step:
        assert optax.tree.norm(clipped) <= 2 * (1 + 1e-5)
    if rule == "share":  # A spike lowers the limits of the next step only.
      np.testing.assert_allclose(optax.tree.norm(clipped), 2, rtol=1e-5)


def test_first_step_clips_a_norm_whose_square_overflows():
  clip = Clipping("share", 2.0)
  grads = {"a": jnp.array([3e25, -4e25])}
  clipped, _, norm = clip_gradients(clip, clip.init(grads), grads)
  np.testing.assert_allclose(norm, 5e25, rtol=1e-6)
  np.testing.assert_allclose(clipped["a"], [1.2, -1.6], rtol=1e-6)


def test_running_mean_begins_at_the_first_norm_above_zero():
  # For example, an expert may get its first token late in training.
  clip = Clipping(
    "adaptive", MAX, relative=RELATIVE, decay=DECAY, warmup=WARMUP
  )
  state = clip.init(gradients(0))
  for step in range(WARMUP + 1):
    _, state, _ = clip_gradients(
      clip, state, gradients(step) | {"a": np.zeros(3, "float32")}
    )
  for scale in (0.5, 0.55):
    a = np.array([0, 0, scale * MAX], "float32")
    clipped, state, _ = clip_gradients(clip, state, gradients(9) | {"a": a})
  limit = RELATIVE * 0.5 * MAX
  np.testing.assert_allclose(clipped["a"], a * min(1, limit / a[2]), rtol=1e-5)
  mean = DECAY * 0.5 * MAX + (1 - DECAY) * clipped["a"][2]
  np.testing.assert_allclose(state.own["a"], mean, rtol=1e-5)


def test_nan_gradient_gives_a_nan_norm_and_nan_gradients():
  clip = Clipping("adaptive", 1.0)
  grads = {"a": jnp.array([jnp.nan])}
  state = clip.init(grads)
  clipped, _, norm = clip_gradients(clip, state, grads)
  assert np.isnan(clipped["a"]).all() and np.isnan(norm)


@pytest.mark.parametrize(
  ("wrong", "said"),
  [
    (dict(rule="global"), "rule must .*'global'; pass 'share'"),
    (
      dict(rule="foo"),
      "rule must be one of 'share', 'adaptive', got 'foo'",
    ),
    (
      dict(max_norm=-1.0),
      "max_norm must be above 0 and finite, got -1.0; to clip nothing",
    ),
    (
      dict(max_norm=float("nan")),
      "max_norm must be above 0 and finite, got nan",
    ),
    (dict(relative=0.0), "relative must be above 0 and finite, got 0.0"),
  ],
)
def test_unknown_rules_and_invalid_limits_are_refused(wrong, said):
  with pytest.raises(ValueError, match=f"Clipping: {said}"):
    # Call without beartype, which users do not have.
    inspect.unwrap(Clipping.__init__)(object.__new__(Clipping), **wrong)
