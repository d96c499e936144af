# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a run, step by step."""

import optax

from train.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
  """Builds the schedule: a linear warmup, then a fall until the last step.

  The first update has 1 / warmup of the peak, not 0, which would waste a batch.
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
