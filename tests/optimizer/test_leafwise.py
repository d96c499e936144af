# SPDX-License-Identifier: Apache-2.0
"""Tests which optax transformations can update one leaf at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import coat_adamw
from coat_jax.optimizer import (
  Clipping,
  leafwise,
  step_in_backward,
  stochastic_rounding,
)
from tests.optimizer.small_stack import LAYERS, after, initial, layer, loss_fn


def step(optimizer, params, layer=layer, after=after, **options):
  @jax.jit
  def step(params, state):
    return step_in_backward(
      optimizer,
      params,
      state,
      before=lambda outer: outer["embedding"],
      layer=layer,
      after=after,
      **options,
    )

  return step(params, optimizer.init(params))


@pytest.mark.parametrize(
  ("tx", "said"),
  [
    (
      optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
      "one of 'embedding' that depends on 'layers/w', as after clipping",
    ),
    pytest.param(
      optax.contrib.dadapt_adamw(1.0),
      "got 'estim_lr', shared by all, that depends on 'embedding'; use the",
      # optax 0.2.6 passes an array as a dtype.
      marks=pytest.mark.filterwarnings(
        "ignore:Implicit conversion of an array to a dtype:DeprecationWarning"
      ),
    ),
    (
      optax.chain(optax.sgd(1e-2), optax.noisy_sgd(1e-2, key=3)),
      r"must not draw random numbers, got one that does \(random_",
    ),
    (
      optax.masked(
        optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
      ),
      "must have the structure of the parameters, got another structure",
    ),
    (
      optax.chain(optax.adam(1e-2), stochastic_rounding()),
      "must not round stochastically, .*got stochastic_rounding",
    ),
    (coat_adamw(1e-2), "as in coat_adamw.* fused_coat_adamw"),
  ],
)
def test_optimizers_that_cannot_update_leaf_by_leaf_are_refused(tx, said):
  optimizer = leafwise(tx)
  params = initial()
  with pytest.raises(ValueError, match=f"leafwise: .*{said}"):
    optimizer.begin(params, optimizer.init(params))


def test_state_without_a_layer_axis_is_refused():
  optimizer = leafwise(optax.chain(optax.zero_nans(), optax.sgd(1e-2)))
  with pytest.raises(ValueError, match="but '0/found_nan/layers/w' has none"):
    step(optimizer, initial())


@pytest.mark.parametrize(
  "tx",
  [
    # Injected hyperparameters are state that all leaves share.
    optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0, 9)),
    # A mask may be a tree, or a prefix of one.
    optax.adamw(
      1e-2, weight_decay=0.5, mask={"embedding": False, "layers": True}
    ),
  ],
)
def test_leaves_share_schedules_counts_and_masks(tx):
  params = initial()
  got = step(leafwise(tx), params)
  grads = jax.grad(loss_fn)(params)
  updates, state = tx.update(grads, tx.init(params), params)
  want = optax.apply_updates(params, updates), state
  got = got.params, got.state
  for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("factor", [1, 1e25])
def test_gradients_are_clipped_before_the_optimizer_sees_them(factor):
  # In the first step, max_norm limits each leaf and each layer of a stack.
  clip, rate = Clipping("share", 0.5), 0.1
  params = initial()

  def scaled(outer, x):
    return factor * after(outer, x)

  done = step(
    leafwise(optax.sgd(rate)),
    params,
    after=scaled,
    clip=clip,
    clip_state=clip.init(params),
  )
  grads = jax.device_get(jax.grad(loss_fn)(params, scaled))
  grads = jax.tree.map(lambda g: g.astype("float64"), grads)
  norms = [
    np.linalg.norm(grads["embedding"]),
    *np.linalg.norm(grads["layers"]["w"], axis=1),
  ]
  scales = 0.5 / np.maximum(norms, 0.5)
  assert scales.min() < 0.9  # Some gradients are clipped.
  want = {
    "embedding": params["embedding"] - rate * scales[0] * grads["embedding"],
    "layers": {
      "w": params["layers"]["w"]
      - rate * scales[1:, None] * grads["layers"]["w"]
    },
  }
  for x, y in zip(*map(jax.tree.leaves, (done.params, want)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
  np.testing.assert_allclose(done.grad_norm, np.linalg.norm(norms), rtol=1e-5)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(done.clip_state))


def test_nonfinite_gradient_of_one_layer_is_reported():
  @jax.custom_vjp
  def spoil(x, factor):
    return x

  spoil.defvjp(lambda x, factor: (x, factor), lambda f, g: (g * f, None))

  def spoiled(params, x, factor):
    return layer({"w": spoil(params["w"], factor)}, x)

  factors = jnp.ones(LAYERS).at[1].set(jnp.nan)
  done = step(
    leafwise(optax.sgd(0.1)), initial(), layer=spoiled, per_layer=factors
  )
  # The order is that of the tree: the embedding, then the stack.
  assert done.is_finite.tolist() == [True, False]
