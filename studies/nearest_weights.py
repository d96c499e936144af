# SPDX-License-Identifier: Apache-2.0
"""Trains bf16 weights with rounding to nearest, as a negative control.

  python -m studies.nearest_weights llama_60m --params bfloat16 [options]

This shows why `train.pretrain` rounds stochastically: rounding to nearest loses
every update that is smaller than half an ulp of its weight. Do not train this
way. The command takes the options of `train.pretrain`, and each of the two
commands can resume runs of the other.
"""

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coat_jax import scale_by_coat_adam
from coat_jax.optimizer import FusedTransformation
from train import pretrain, step
from train.config import TrainConfig
from train.optimizers import learning_rate

_build_optimizer = step.build_optimizer


def build_optimizer(
  config: TrainConfig, mesh: Mesh | None = None
) -> FusedTransformation:
  """Builds AdamW like `train.step.build_optimizer`, but rounds to nearest."""
  if mesh is not None or config.params == "bfloat16_low8":
    raise ValueError(
      "nearest_weights: params must be bfloat16 on one device, got params "
      f"{config.params} and mesh {config.mesh!r}; use train.pretrain"
    )
  optim = config.optim
  adam = scale_by_coat_adam(
    optim.b1,
    optim.b2,
    optim.eps,
    codec=optim.moment_codec(),
    seed=config.seed,
  )

  def apply(grads: Any, state: Any, params: Any, *, grad_scale: Any):
    grads = jax.tree.map(lambda g: grad_scale * g.astype(jnp.float32), grads)
    updates, new_state = adam.update(grads, state)
    rate = learning_rate(config)(state.count)

    def add(p, update, is_decayed):
      exact = p.astype(jnp.float32)
      decay = optim.weight_decay if is_decayed else 0.0
      return (exact - rate * (update + decay * exact)).astype(p.dtype)

    return jax.tree.map(add, params, updates, step.decays(params)), new_state

  return _build_optimizer(config)._replace(apply=apply)


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, trains, and returns the exit status."""
  with mock.patch.object(step, "build_optimizer", build_optimizer):
    return pretrain.main(arguments)


if __name__ == "__main__":
  sys.exit(main())
