# SPDX-License-Identifier: Apache-2.0
"""Runs that store weights in bf16 or in 24 bits: initial state, steps, sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax.optimizer import LowBitsState, join_weights
from tests.comparing import assert_same_bits
from tests.matrices import quick
from tests.optimizer.test_weights import oracle
from tests.train.steps import SMALL, TOKENS, Trained, on
from train import step, update, weights
from train.objective import objective_of

KINDS = ("bfloat16", "bfloat16_low8")
MESH = "data=2,fsdp=2,tensor=2"
NORMS = ("norm/scale",)


# Stores moments in f32, so that no codec encodes their zeros.
PLAIN = dataclasses.replace(SMALL.optim, codec="float32", group_size=128)
# These options compile fast.
FAST = dict(recipe="bf16", optim=PLAIN)


def stored(kind, **options):
  return dataclasses.replace(SMALL, params=kind, **options)


def by_name(tree):
  return dict(zip(step.leaf_names(tree), jax.tree.leaves(tree), strict=True))


@functools.cache
def initial(kind, mesh=""):
  config = stored(kind, mesh=mesh, **FAST)
  run = Trained(config)
  return step.initial_state(config, run.optimizer, run.mesh)


@pytest.mark.parametrize("kind", quick(1, reversed(KINDS)))
def test_first_weights_are_f32_weights_rounded_to_nearest(kind):
  exact, ours = by_name(initial("float32").params), initial(kind)
  got = by_name(ours.params)
  low = None
  if kind == "bfloat16_low8":
    low = by_name(ours.optimizer.low)
  for name, x in exact.items():
    x = np.asarray(x)
    if name.endswith(NORMS):
      assert_same_bits(got[name], x)
      assert low is None or (low[name].shape, int(low[name])) == ((), 0)
    elif low is None:
      assert_same_bits(got[name], x.astype(ml_dtypes.bfloat16))
    else:
      want = oracle(x.view(np.uint32))
      np.testing.assert_array_equal(
        np.asarray(got[name]).view(np.uint16), want[0]
      )
      np.testing.assert_array_equal(low[name], want[1])
  adam, _ = weights.without_low(ours.optimizer)
  assert_same_bits(adam, initial("float32").optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_first_state_does_not_depend_on_the_mesh(kind):
  ours = initial(kind, MESH)
  assert_same_bits(ours, initial(kind))
  abstract = Trained(stored(kind, mesh=MESH, **FAST)).abstract
  for x, want in zip(
    jax.tree.leaves(ours), jax.tree.leaves(abstract), strict=True
  ):
    assert x.sharding.is_equivalent_to(want.sharding, x.ndim)


def test_first_weights_are_sampled_one_layer_at_a_time():
  deep = dataclasses.replace(SMALL.model, num_layers=64)
  config = stored("bfloat16_low8", model=deep, optim=PLAIN)
  run = Trained(config)
  made = step.initializer(config, run.optimizer).lower().compile()
  temporary = made.memory_analysis().temp_size_in_bytes
  layers = sum(x.size for x in jax.tree.leaves(run.abstract.params["layers"]))
  # Random bits, normal values and their sums need less memory than 8 layers in
  # f32.
  assert temporary < 4 * layers / 8


def mean_gradients(config):
  graph = step.build_graph(config)

  def compute(params):
    batch = objective_of(config.model).batch_of(jnp.asarray(TOKENS))
    return update._mean_gradients(config, graph, None, params, batch)

  return compute


@functools.cache
def summed(accumulate, dtype="float32", **options):
  config = stored(
    "bfloat16", accumulate=accumulate, grad_accumulate=dtype, **options
  )
  params = initial(config.params).params
  found = jax.jit(mean_gradients(config))(params)
  return jax.tree.map(np.asarray, found), Trained(config).abstract.params


def test_gradients_have_the_dtypes_of_stored_weights():
  config = stored("bfloat16")
  params = Trained(config).abstract.params
  _, grads = jax.eval_shape(mean_gradients(config), params)
  assert jax.tree.map(lambda g: g.dtype, grads) == (
    jax.tree.map(lambda p: p.dtype, params)
  )


@pytest.mark.parametrize("dtype", quick(1, ["bfloat16", "float32"]))
def test_sums_over_microbatches_have_the_requested_dtype(dtype):
  # Without FP8, layers round a microbatch as they round the whole batch.
  (_, want), _ = summed(1, recipe="bf16", compute="float32")
  (_, got), params = summed(4, dtype, recipe="bf16", compute="float32")
  for name, g in by_name(got).items():
    kept = by_name(params)[name].dtype
    assert g.dtype == (kept if dtype == "bfloat16" else jnp.float32)
    exact = np.asarray(by_name(want)[name], np.float64)
    error = np.abs(np.asarray(g, np.float64) - exact)
    # BF16 rounds the batch's gradient, four microbatches' gradients and, with
    # dtype bfloat16, three sums.
    ulps = 2.0**-8 * (1 + 4 + (3 if dtype == "bfloat16" else 0))
    assert np.max(error) <= ulps * np.max(np.abs(exact))


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(grad_accumulate="bfloat16"), "got accumulate 1 and params float32"),
    (
      dict(grad_accumulate="bfloat16", accumulate=2),
      "got accumulate 2 and params float32",
    ),
    (
      dict(grad_accumulate="bfloat16", params="bfloat16"),
      "got accumulate 1 and params bfloat16",
    ),
  ],
)
def test_dtype_of_sums_is_refused_if_nothing_is_summed(options, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(SMALL, **options)


def test_twins_have_f32_weights():
  config = stored("bfloat16", accumulate=2, grad_accumulate="bfloat16")
  twin = config.bf16_twin(seed=1, out="twin")
  assert (twin.params, twin.grad_accumulate) == ("float32", "float32")


@functools.cache
def trained(kind, recipe, mesh=""):
  options = FAST if recipe == "bf16" else {}
  return Trained(on(stored(kind, **options), mesh)).run()


@pytest.mark.slow
def test_run_with_24_bits_learns_and_changes_its_low_bytes():
  got = trained("bfloat16_low8", "bf16")
  assert got.losses[-1] < got.losses[0] - 0.3
  state = got.state
  assert isinstance(state.optimizer, LowBitsState)
  joined = join_weights(state.params, state.optimizer.low)
  for name, x in by_name(joined).items():
    y = np.asarray(by_name(state.params)[name], np.float32)
    # Rounding to nearest moves values by at most half an ulp of bf16.
    np.testing.assert_allclose(y, x, rtol=2**-8)
    if not name.endswith(NORMS):
      before = by_name(got.initial.optimizer.low)[name]
      assert np.any(by_name(state.optimizer.low)[name] != before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stored_weights_learn_as_f32_weights_do(kind):
  want, got = trained("float32", "coat"), trained(kind, "coat")
  assert got.losses[0] == pytest.approx(want.losses[0], abs=2e-2)
  assert got.losses[-1] == pytest.approx(want.losses[-1], abs=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_on_a_mesh_are_near_those_on_one_device(kind):
  alone, together = trained(kind, "coat"), trained(kind, "coat", MESH)
  # As in test_mesh, the summation order differs, here before values are rounded
  # to FP8 and bf16.
  assert np.max(np.abs(np.subtract(alone.losses, together.losses))) <= 2e-2
