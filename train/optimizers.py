# SPDX-License-Identifier: Apache-2.0
"""The learning rate schedule, and an adapter for optimizers from optax."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import apply_updates
from coat_jax.optimizer import FusedTransformation
from coat_jax.optimizer.state import find_states
from train import weights
from train.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
  """Builds the schedule: a linear warmup, then a cosine or linear decay.

  The warmup of n steps begins at 1 / n of the peak instead of 0, because a step
  with a rate of 0 would waste a batch.
  """
  optim = config.optim
  warmup = optim.warmup_steps(config.steps)
  remaining = max(config.steps - warmup, 1)
  if optim.schedule == "cosine":
    fall = optax.cosine_decay_schedule(optim.lr, remaining, optim.min_lr_ratio)
  else:
    end = optim.lr * optim.min_lr_ratio
    fall = optax.linear_schedule(optim.lr, end, remaining)
  if not warmup:
    return fall
  rise = optax.linear_schedule(optim.lr / warmup, optim.lr, max(warmup - 1, 1))
  return optax.join_schedules([rise, fall], [warmup])


def of_transformation(
  tx: optax.GradientTransformation, *, seed: ArrayLike
) -> FusedTransformation:
  """Turns an optax transformation into a `FusedTransformation`.

  The state of `tx` must contain a `MomentState`.
  """

  def apply(grads, state, params, *, grad_scale=None):
    grads = weights.in_f32(grads)
    if grad_scale is not None:
      grads = jax.tree.map(lambda g: g * jnp.float32(grad_scale), grads)
    updates, state = tx.update(grads, state, params)
    count = find_states("train", state)[0].count
    return apply_updates(params, updates, step=count, seed=seed), state

  def refuse(*args):
    raise NotImplementedError(
      "train: only coat_adamw and coat_lion can update parameters in the "
      "backward pass, got another optimizer; pass --optim.optimizer coat_adamw"
    )

  return FusedTransformation(tx.init, apply, refuse, refuse)
