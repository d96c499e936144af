# SPDX-License-Identifier: Apache-2.0
"""The memory of a run, planned from its configuration.

Nothing is compiled and no device is used: `coat_jax.plan` has the sums, the
run's abstract state the sizes of weights and moments.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType

from coat_jax.layers import vocabulary
from coat_jax.models.config import ModelConfig
from coat_jax.plan import (
  DecoderShape,
  Load,
  Memory,
  fullest,
  largest_batch,
  plan_step,
)
from train import step
from train.config import TrainConfig


def shape_of(model: ModelConfig) -> DecoderShape:
  """Returns the sizes of a model that its memory depends on."""
  return DecoderShape(
    num_layers=model.num_layers,
    d_model=model.d_model,
    d_ff=model.d_ff,
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    vocab_size=model.vocab_size,
    head_dim=model.head_dim,
    is_layer_norm=model.choices.norm == "layer",
    norm_has_scale=model.choices.norm_has_scale,
    tied_embeddings=model.tied_embeddings,
    pre_norm=model.choices.pre_norm,
    post_norm=model.choices.post_norm,
    qk_norm=model.choices.qk_norm,
    activation=model.choices.activation,
    is_gated=model.choices.is_gated,
    num_experts=model.num_experts or 0,
    experts_per_token=model.experts_per_token or 0,
  )


class AbstractState(NamedTuple):
  """What a run stores between steps, without its values.

  Attributes:
    params: Its parameters, with shardings on a mesh.
    optimizer: All of the optimizer's.
  """

  params: Any
  optimizer: Any


def state_of(config: TrainConfig) -> AbstractState:
  """Builds what `plan` and `largest` need of a run, whatever its batch.

  Raises:
    ValueError: a device would have a part of a group of moments.
  """
  mesh = None
  if sizes := config.mesh_sizes:
    mesh = AbstractMesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(AxisType.Auto,) * len(sizes),
    )
  state = step.abstract_state(config, step.build_optimizer(config), mesh)
  optimizer = state.optimizer, state.exact, state.clip
  return AbstractState(state.params, optimizer)


class States:
  """`state_of`, once for runs that store the same.

  Recipes have the same parameters, and what clipping keeps is a few
  numbers.
  """

  def __init__(self):
    self._known: dict[tuple, AbstractState] = {}

  def of(self, config: TrainConfig) -> AbstractState:
    """Returns the run's abstract state."""
    optim = dataclasses.replace(config.optim, clip="global")
    key = config.model, config.mesh, config.params, config.report_state, optim
    if key not in self._known:
      self._known[key] = state_of(config)
    return self._known[key]


def plan(
  config: TrainConfig, state: AbstractState | None = None
) -> dict[str, Memory]:
  """Plans a run's memory on one of its GPUs.

  Args:
    config: The run.
    state: From `state_of`, if it is there already.

  Returns:
    By moment of a step, as `coat_jax.plan.plan_step`.

  Raises:
    ValueError: a device would have a part of a group of moments.
  """
  state = state or state_of(config)
  sizes, model = config.mesh_sizes, config.model
  tensor = sizes.get("tensor", 1)
  batch = config.batch // batch_shards(config) // config.accumulate
  load = Load(
    batch=batch,
    seq=config.seq,
    fsdp=sizes.get("fsdp", 1),
    tensor=tensor,
    is_on_mesh=math.prod(sizes.values()) > 1,
    accumulate=config.accumulate,
    loss_positions=vocabulary.loss_positions(
      batch, config.seq, model.vocab_size // tensor
    ),
    remat=config.remat,
    optimizer_in_backward=config.optimizer_in_backward,
    sums_dtype=config.grad_accumulate,
  )
  return plan_step(
    shape_of(model),
    config.coat_recipe(),
    load,
    params=state.params,
    optimizer_state=state.optimizer,
  )


def largest(
  config: TrainConfig,
  memory_bytes: int,
  state: AbstractState | None = None,
) -> int:
  """Finds the most sequences a step for which a run fits its GPUs.

  Args:
    config: The run, of any batch.
    memory_bytes: Memory of a GPU.
    state: From `state_of`, if it is there already.

  Returns:
    The batch; 0 where nothing fits.
  """
  known = state or state_of(config)
  shards = batch_shards(config) * config.accumulate

  def peak(batch: int) -> Memory:
    run = dataclasses.replace(config, batch=batch * shards)
    return fullest(plan(run, known))[1]

  return shards * largest_batch(peak, memory_bytes)


def batch_shards(config: TrainConfig) -> int:
  """Counts the devices that sequences are split over."""
  sizes = config.mesh_sizes
  return sizes.get("data", 1) * sizes.get("fsdp", 1)
