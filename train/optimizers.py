# SPDX-License-Identifier: Apache-2.0
"""The optimizers of `--optim.optimizer`: one function each, by name.

All are stepped as `fused_coat_adamw` is. One that is an optax transformation
(`of_transformation`) adds its updates to the weights after the backward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import (
  FusedTransformation,
  apply_updates,
  coat_muon,
  decoder_matrices,
  fused_coat_adamw,
  fused_coat_lion,
)
from coat_jax.optimizer.state import MomentState, find_states
from train import weights
from train.config import TrainConfig
from train.schedule import learning_rate

# Muon's updates are as large as AdamW's are, so that both have one rate:
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
  """Builds the run's optimizer.

  Args:
    config: The run.
    decays: Function of the parameters, which of them decay.
    shardings: The parameters' on a mesh, or None.
    rate: The learning rate, possibly traced; None for the run's schedule.
    seed: Of stochastic rounding, likewise; None for the run's.
  """
  rate = learning_rate(config) if rate is None else rate
  seed = config.seed if seed is None else seed
  make = OPTIMIZERS[config.optim.optimizer]
  return make(config, decays, shardings, rate, seed)


def _adamw(config, decays, shardings, rate, seed) -> FusedTransformation:
  optim = config.optim
  return fused_coat_adamw(
    rate,
    optim.b1,
    optim.b2,
    optim.eps,
    codec=optim.moment_codec(),
    weight_decay=optim.weight_decay,
    mask=decays,
    low_bits=config.params == "bfloat16_low8",
    seed=seed,
    implementation="xla" if config.implementation == "xla" else None,
    shardings=shardings,
  )


def _lion(config, decays, shardings, rate, seed) -> FusedTransformation:
  optim = config.optim
  return fused_coat_lion(
    rate,
    optim.b1,
    optim.b2,
    codec=optim.moment_codec(),
    weight_decay=optim.weight_decay,
    mask=decays,
    low_bits=config.params == "bfloat16_low8",
    seed=seed,
    implementation="xla" if config.implementation == "xla" else None,
    shardings=shardings,
  )


def _muon(config, decays, shardings, rate, seed) -> FusedTransformation:
  optim, model = config.optim, config.model
  muon = coat_muon(
    rate,
    beta=optim.momentum,
    eps=optim.eps,
    weight_decay=optim.weight_decay,
    weight_decay_mask=decays,
    adam_b1=optim.b1,
    adam_b2=optim.b2,
    adam_weight_decay=optim.weight_decay,
    adam_weight_decay_mask=decays,
    consistent_rms=_CONSISTENT_RMS,
    matrices=decoder_matrices(
      num_heads=model.num_heads, num_kv_heads=model.num_kv_heads
    ),
    codec=optim.moment_codec(),
    seed=seed,
    shardings=shardings,
  )
  return of_transformation(muon, seed=seed)


OPTIMIZERS = {"coat_adamw": _adamw, "coat_lion": _lion, "coat_muon": _muon}


def of_transformation(
  tx: optax.GradientTransformation, *, seed: ArrayLike
) -> FusedTransformation:
  """Steps weights by an optax transformation with stored moments.

  Args:
    tx: Such as `coat_muon`.
    seed: Of the random words that round weights in bfloat16.

  Returns:
    The optimizer; `begin` and `explain` refuse.
  """

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
