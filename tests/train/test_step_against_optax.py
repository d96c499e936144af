# SPDX-License-Identifier: Apache-2.0
"""Steps with f32 moments against optax's clipping and AdamW.

The step sums the gradients of two microbatches; optax gets the gradients of the
whole batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax.models.config import ModelConfig
from coat_jax.models.loss import loss_fn
from tests.comparing import assert_close, jit
from train import step
from train.config import OptimConfig
from train.presets import demo

# All numbers but grad_clip differ from the defaults. Each of them changes
# updates by 1 % or more.
OPTIM = OptimConfig(
  lr=1e-2,
  codec="float32",
  schedule="linear",
  warmup=2,
  min_lr_ratio=0.1,
  b1=0.8,
  b2=0.9,
  eps=1e-3,
  weight_decay=2.0,
  grad_clip=1.0,
)
# The rate rises for 2 steps, then falls to a tenth by the end of the sixth.
RATES = [5e-3, 1e-2, 1e-2, 7.75e-3]
CONFIG = dataclasses.replace(
  demo(),
  model=ModelConfig(
    family="llama",
    num_layers=1,
    d_model=32,
    d_ff=64,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=64,
  ),
  optim=OPTIM,
  steps=6,
  batch=2,
  accumulate=2,
  seq=16,
  recipe="bf16",
  compute="float32",
  report_state=True,
)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 2, 17), np.int32)


def decays(params):
  """Selects all matrices except the embedding."""
  return jax.tree.map_with_path(
    lambda path, _: path[-1].key in ("kernel", "head"), params
  )


def draw(params, stddev):
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda w: rng.normal(0, stddev, w.shape).astype(w.dtype), params
  )


def test_steps_equal_optax_clipping_and_adamw():
  graph, optimizer = step.build_graph(CONFIG), step.build_optimizer(CONFIG)
  run = jit(step.train_step(CONFIG, graph, optimizer))
  adamw = optax.chain(
    optax.clip_by_global_norm(OPTIM.grad_clip),
    optax.adamw(
      lambda count: jnp.array(RATES)[count],
      OPTIM.b1,
      OPTIM.b2,
      OPTIM.eps,
      weight_decay=OPTIM.weight_decay,
      mask=decays,
    ),
  )

  @jit
  def expect(params, expected, tokens):
    def loss(params):
      return loss_fn(nnx.merge(graph, params), tokens)

    loss, grads = jax.value_and_grad(loss)(params)
    return loss, grads, *adamw.update(grads, expected, params)

  state = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    step.abstract_state(CONFIG, optimizer),
  )
  expected = adamw.init(state.params)
  for i, rate in enumerate(RATES):
    # Before the last update, make weights large, so that gradients are clipped.
    if i in (0, 3):
      state = state._replace(params=draw(state.params, (0.1, 0.5)[i == 3]))
    loss, grads, updates, expected = expect(state.params, expected, TOKENS[i])
    before = state.params
    state, metrics = run(state, TOKENS[i])
    norm = np.sqrt(
      sum(
        np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)
      )
    )
    assert (norm > OPTIM.grad_clip) == (i == 3)
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.lr) == pytest.approx(rate, rel=1e-5), f"update {i}"
    assert metrics.is_finite.all() and int(state.step) == i + 1
    moved = jax.tree.map(
      lambda new, old: np.float64(new) - np.float64(old), state.params, before
    )
    # Rounding changes parameters by at most 6e-8. Updates change at least one
    # value per leaf by 1e-3 or more.
    assert_close(moved, updates, 1e-3, f"update {i}")
    # The exact and the stored moments are those of the clipped gradients.
    adam = expected[1][0]
    assert_close((state.exact.mu, state.exact.nu), (adam.mu, adam.nu))
    stored = state.optimizer.mu.codes, state.optimizer.nu.codes
    assert_close(stored, (adam.mu, adam.nu))

  # These weights are finite, but matmuls with them overflow.
  state = state._replace(params=draw(state.params, 1e25))
  _, metrics = run(state, TOKENS[0])
  assert not metrics.is_finite.all()
  assert len(metrics.is_finite) == len(jax.tree.leaves(state.params))
