# SPDX-License-Identifier: Apache-2.0
"""Adds `optimizer.type: coat` to Levanter's configuration.

Importing this module registers the optimizer. Levanter's commands do not import
it, so start them like this:

  python -m coat_jax.integrations.levanter levanter.main.train_lm \
    --config_path config.yaml --optimizer.type coat
"""

import runpy
import sys
from dataclasses import dataclass
from typing import Any

import haliax  # pyright: ignore[reportMissingImports]
import jax
import optax
from haliax import NamedArray  # pyright: ignore[reportMissingImports]
from haliax.partitioning import (  # pyright: ignore[reportMissingImports]
  physical_axis_name,
  physical_axis_size,
)
from levanter.optim.config import OptimizerConfig  # pyright: ignore[reportMissingImports]

from coat_jax import coat_adamw


@OptimizerConfig.register_subclass("coat")
@dataclass(frozen=True)
class CoatConfig(OptimizerConfig):
  """The options of AdamW with moments in FP8.

  Attributes:
    beta1, beta2, epsilon, max_grad_norm: as in Levanter's `AdamConfig`, with
      the same defaults. The base class adds fields for the learning rate, its
      schedule and weight decay.
  """

  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  max_grad_norm: float | None = 1.0

  def build(
    self, num_train_steps: int
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer."""

    def make(learning_rate):
      optimizer = coat_adamw(
        learning_rate,
        b1=self.beta1,
        b2=self.beta2,
        eps=self.epsilon,
        weight_decay=self.weight_decay,
        mask=self.build_weight_decay_mask(),
      )
      named = optax.GradientTransformationExtraArgs(
        lambda params: _fit_axes(optimizer.init(params)),
        optimizer.update,
      )
      if not self.max_grad_norm:
        return named
      return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), named)

    # Levanter logs the learning rate in the state of `inject_hyperparams`.
    schedule = self.lr_scheduler(num_train_steps)
    return optax.inject_hyperparams(make)(learning_rate=schedule)


def _fit_axes(state: Any) -> Any:
  """Renames those axes of a state's arrays that devices cannot split evenly.

  haliax gives a moment's arrays the axis names of the parameter. But the arrays
  `amax` and `range` usually have only one entry per group of values along the
  last axis. Levanter does not split an axis whose name it does not know.
  """

  def fitted(x):
    if not haliax.is_named_array(x):
      return x
    if x.array.ndim == 0:
      return NamedArray(x.array, ())
    return NamedArray(x.array, tuple(map(renamed, x.axes, x.array.shape)))

  def renamed(axis, size):
    name = axis.name
    if physical_axis_name(axis) and size % physical_axis_size(axis):
      name = f"{name}_groups"
    return haliax.Axis(name, size)

  return jax.tree.map(fitted, state, is_leaf=haliax.is_named_array)


if __name__ == "__main__":
  if len(sys.argv) < 2:
    sys.exit(
      "usage: python -m coat_jax.integrations.levanter "
      "levanter.main.train_lm [--config_path CONFIG] [--KEY VALUE ...]"
    )
  sys.argv = sys.argv[1:]
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
