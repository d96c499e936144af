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
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.plan import (
  DecoderShape,
  Images,
  Load,
  Memory,
  fullest,
  largest_batch,
  plan_step,
  plan_vision_step,
)
from coat_jax.plan.vision import Trained
from coat_jax.recipe import CoatRecipe
from train import step
from train.config import TrainConfig
from train.finetune_config import FinetuneConfig


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
    key += (getattr(config, "trained", None),)
    if key not in self._known:
      self._known[key] = state_of(config)
    return self._known[key]


def plan(
  config: TrainConfig,
  state: AbstractState | None = None,
  *,
  images_each: int = 1,
) -> dict[str, Memory]:
  """Plans a run's memory on one of its GPUs.

  Args:
    config: The run; one of a LLaVA is planned on one GPU, in one microbatch.
    state: From `state_of`, if it is there already.
    images_each: Of a LLaVA, the images that a sequence has room for.

  Returns:
    By moment of a step, as `coat_jax.plan.plan_step`.

  Raises:
    ValueError: a device would have a part of a group of moments.
  """
  state = state or state_of(config)
  shape: Any = config.model
  if isinstance(config, FinetuneConfig) and isinstance(
    shape, VisionLanguageConfig
  ):
    return plan_vision(
      shape,
      config.coat_recipe(),
      trained=config.trained,
      params=state.params,
      optimizer_state=state.optimizer,
      batch=config.batch,
      seq=config.seq,
      images_each=images_each,
    )
  sizes, model = config.mesh_sizes, shape
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
  *,
  images_each: int = 1,
) -> int:
  """Finds the most sequences a step for which a run fits its GPUs.

  Args:
    config: The run, of any batch.
    memory_bytes: Memory of a GPU.
    state: From `state_of`, if it is there already.
    images_each: As of `plan`.

  Returns:
    The batch; 0 where nothing fits.
  """
  known = state or state_of(config)
  shards = batch_shards(config) * config.accumulate

  def peak(batch: int) -> Memory:
    run = dataclasses.replace(config, batch=batch * shards)
    return fullest(plan(run, known, images_each=images_each))[1]

  return shards * largest_batch(peak, memory_bytes)


def plan_vision(
  model: VisionLanguageConfig,
  recipe: CoatRecipe,
  *,
  trained: Trained,
  params: Any,
  optimizer_state: Any,
  batch: int,
  seq: int,
  images_each: int,
) -> dict[str, Memory]:
  """Plans the memory of a step of a LLaVA on one GPU.

  Args:
    model: Its shape.
    recipe: Of tower and decoder.
    trained, params, optimizer_state: As of `plan_vision_step`.
    batch: Sequences.
    seq: Tokens of each.
    images_each: Images that each has room for.

  Returns:
    By moment of a step, as `coat_jax.plan.plan_vision_step`.
  """
  text, vision = model.text, model.vision
  tower = DecoderShape(
    num_layers=model.feature_layer % (vision.num_layers + 1),
    d_model=vision.d_model,
    d_ff=vision.d_ff,
    num_heads=vision.num_heads,
    num_kv_heads=vision.num_heads,
    vocab_size=0,
    is_layer_norm=True,
    is_gated=False,
  )
  positions = vocabulary.loss_positions(batch, seq, text.vocab_size)
  return plan_vision_step(
    shape_of(text),
    tower,
    recipe,
    Load(batch=batch, seq=seq, loss_positions=positions),
    Images(
      count=batch * images_each,
      tower_tokens=vision.num_tokens,
      tokens=model.tokens_each,
    ),
    trained=trained,
    params=params,
    optimizer_state=optimizer_state,
  )


def batch_shards(config: TrainConfig) -> int:
  """Counts the devices that sequences are split over."""
  sizes = config.mesh_sizes
  return sizes.get("data", 1) * sizes.get("fsdp", 1)
