# SPDX-License-Identifier: Apache-2.0
"""The optimizers of `--optim.optimizer`, and the learning rate's schedule.

All share the interface of `fused_coat_adamw`. `of_transformation` gives an
optax transformation this interface, and adds its updates after the backward
pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import apply_updates, coat_muon
from coat_jax.models import model_matrices
from coat_jax.optimizer import (
  FusedTransformation,
  fused_coat_adamw,
  fused_coat_lion,
)
from coat_jax.optimizer.state import MomentState, find_states
from train import weights
from train.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
  """Builds the schedule: a linear warmup, then a fall until the last step.

  The first update uses peak / warmup; a rate of 0 would waste a batch.
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


# With this, Muon's updates are as large as AdamW's, and both use one rate:
# arXiv:2502.16982, section 2.2.
_CONSISTENT_RMS = 0.2


def build(
  config: TrainConfig,
  decays: Callable[[Any], Any],
  shardings: Any,
  *,
  rate: optax.ScalarOrSchedule | None = None,
  seed: ArrayLike | None = None,
) -> FusedTransformation:
  """Builds the run's optimizer; see `train.step.build_optimizer`."""
  optim = config.optim
  rate = learning_rate(config) if rate is None else rate
  seed = config.seed if seed is None else seed
  shared: dict[str, Any] = dict(
    codec=optim.moment_codec(),
    weight_decay=optim.weight_decay,
    seed=seed,
    shardings=shardings,
  )
  if optim.optimizer == "coat_muon":
    muon = coat_muon(
      rate,
      beta=optim.momentum,
      eps=optim.eps,
      weight_decay_mask=decays,
      adam_b1=optim.b1,
      adam_b2=optim.b2,
      adam_weight_decay=optim.weight_decay,
      adam_weight_decay_mask=decays,
      consistent_rms=_CONSISTENT_RMS,
      matrices=model_matrices(config.model),
      **shared,
    )
    return of_transformation(muon, seed=seed)
  shared |= dict(
    mask=decays,
    low_bits=config.params == "bfloat16_low8",
    implementation="xla" if config.implementation == "xla" else None,
  )
  if optim.optimizer == "coat_lion":
    return fused_coat_lion(rate, optim.b1, optim.b2, **shared)
  return fused_coat_adamw(rate, optim.b1, optim.b2, optim.eps, **shared)


def of_transformation(
  tx: optax.GradientTransformation, *, seed: ArrayLike
) -> FusedTransformation:
  """Makes an optimizer from an optax transformation with stored moments."""

  def apply(grads, state, params, *, grad_scale=None):
    grads = weights.in_f32(grads)
    if grad_scale is not None:
      grads = jax.tree.map(lambda g: g * jnp.float32(grad_scale), grads)
    updates, state = tx.update(grads, state, params)
    count = find_states("train", state, MomentState)[0].count
    return apply_updates(params, updates, step=count, seed=seed), state

  def refuse(*args):
    raise NotImplementedError(
      "train: only coat_adamw and coat_lion step leaf by leaf, got another "
      "optimizer; pass --optim.optimizer with one of them"
    )

  return FusedTransformation(tx.init, apply, refuse, refuse)
