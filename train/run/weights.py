# SPDX-License-Identifier: Apache-2.0
"""The weights of a run's checkpoint, without the rest of its state."""

from typing import Any

import jax
from jax.sharding import Mesh

from train import step as steps
from train import weights
from train.config import TrainConfig
from train.run.checkpoint import restore_state
from train.run.directory import RunDirectory


def read_weights(
  run: RunDirectory, step: int, config: TrainConfig, mesh: Mesh | None = None
) -> Any:
  """Reads the weights of a checkpoint.

  Args:
    run: The run.
    step: One of its checkpoints.
    config: The run's, on this mesh.
    mesh: Devices to read onto; None for one.

  Returns:
    Parameters, nested dicts, as they are stored; those with low bytes in f32.

  Raises:
    ValueError: the checkpoint holds another state.
  """
  abstract = steps.abstract_state(
    config, steps.build_optimizer(config, mesh), mesh
  )
  # What is () is not read.
  abstract = abstract._replace(exact=(), clip=())
  if config.params != "bfloat16_low8":  # Else it has the weights' low bytes.
    none: Any = ()
    abstract = abstract._replace(optimizer=none)
  state = restore_state(run.checkpoints, step, abstract)
  if config.params != "bfloat16_low8":
    return state.params
  return jax.jit(weights.load)(
    state.params, weights.without_low(state.optimizer)[1]
  )
