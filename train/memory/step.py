# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run's training step on one GPU.

Peak memory occurs at one of these points. The list shows which arrays are in
memory at each point, in addition to the weights and the optimizer's state:

  loss       everything that layers save, and a chunk of logits
  backward   everything that layers save, the gradients of the layers and of the
             output weights, and the arrays of the one layer that is being
             differentiated
  embedding  all gradients; the embedding's gradient is not yet summed over
             GPUs. The optimizer works in place and needs no more memory.
  tower      (if a vision tower is trained) all gradients, what the tower's
             layers save, and the arrays of the tower's layer that is being
             differentiated

We plan the step of `train.step`. It scans the layers, stores gradients in the
dtypes of the parameters, computes the loss in chunks of logits and donates its
state. If the optimizer runs in the backward pass, each layer's gradients are
freed at once. Frozen parts have no gradients. A frozen tower saves nothing for
the backward pass. A frozen decoder saves as much as a trained decoder, because
the projector's gradients pass through the decoder's layers.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from coat_jax.layers import vocabulary
from coat_jax.models.config import ModelConfig
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.numerics.formats import array_bytes
from train import step
from train.config import TrainConfig
from train.memory.backward import BF16, F32, Layer, layer_backward
from train.mesh import batch_devices

# For a vision-language model, only runs with these options can be planned.
_WITH_IMAGES: dict[str, Any] = {
  "recipe": "coat",
  "mesh": "",
  "accumulate": 1,
  "remat": "none",
  "weight_cache": "scale",
  "optimizer_in_backward": False,
}


class Memory(NamedTuple):
  """The bytes in use on one GPU at one point of a step, by their purpose."""

  weights: int
  # Gradients, and their sums over microbatches. If the optimizer runs in the
  # backward pass, the gradients of a layer count as temporary.
  gradients: int
  optimizer: int
  activations: int  # Arrays that layers saved for the backward pass.
  temporary: int  # All other arrays.

  @property
  def total(self) -> int:
    return sum(self)


class AbstractState(NamedTuple):
  """The shapes and shardings of the state that a run keeps between steps."""

  params: Any
  optimizer: Any


_STATES: dict[tuple, AbstractState] = {}


def state_of(config: TrainConfig) -> AbstractState:
  """Returns a run's abstract state; caches it for runs with the same state."""
  key = config.model, config.mesh, config.params, config.report_state
  key += config.optim, getattr(config, "trained", None)
  if key not in _STATES:
    mesh: Any = None
    if sizes := config.mesh_sizes:
      types = (AxisType.Auto,) * len(sizes)
      mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    state = step.abstract_state(config, step.build_optimizer(config), mesh)
    optimizer = state.optimizer, state.exact, state.clip
    _STATES[key] = AbstractState(state.params, optimizer)
  return _STATES[key]


def device_bytes(tree: Any) -> int:
  """Counts the bytes of a tree of arrays on one device."""

  def count(x) -> int:
    where = getattr(x, "sharding", None)
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return array_bytes(shape, x.dtype)

  return sum(count(x) for x in jax.tree.leaves(tree))


def plan(
  config: TrainConfig,
  state: AbstractState | None = None,
  *,
  images_each: int = 1,  # Number of image slots in each sequence.
) -> dict[str, Memory]:
  """Plans a run's memory at each point of a step on one of its GPUs."""
  state = state or state_of(config)
  if isinstance(config.model, VisionLanguageConfig):
    return _plan_vision(config, state, images_each)
  return _plan_decoder(config, config.model, state)


def fullest(points: dict[str, Memory]) -> tuple[str, Memory]:
  """Returns the name and the memory of the point that needs the most memory."""
  return max(points.items(), key=lambda point: point[1].total)


def peak_bytes(config: TrainConfig, *, images_each: int = 1) -> int:
  """Returns the planned peak memory of a run on one of its GPUs."""
  return fullest(plan(config, images_each=images_each))[1].total


def largest(
  config: TrainConfig, memory_bytes: int, *, images_each: int = 1
) -> int:
  """Finds the largest batch that fits into memory; 0 if none fits."""
  shards = batch_devices(config.mesh_sizes) * config.accumulate

  def fits(sequences: int) -> bool:
    run = dataclasses.replace(config, batch=sequences * shards)
    return peak_bytes(run, images_each=images_each) <= memory_bytes

  if not fits(1):
    return 0
  low, high = 1, 2
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return shards * low


def _plan_decoder(
  config: TrainConfig, model: ModelConfig, state: AbstractState
) -> dict[str, Memory]:
  """Plans the step of a decoder, alone or in a `VisionLanguageModel`."""
  sizes, recipe = config.mesh_sizes, config.coat_recipe()
  batch = config.batch // batch_devices(sizes) // config.accumulate
  layer = Layer(
    model=model,
    recipe=recipe,
    tokens=batch * config.seq,
    value=_value_bytes(state.params),
    fsdp=sizes.get("fsdp", 1),
    tensor=sizes.get("tensor", 1),
    expert=sizes.get("expert", 1),
    is_on_mesh=math.prod(sizes.values()) > 1,
    remat=config.remat,
    optimizer_in_backward=config.optimizer_in_backward,
  )
  weights, value = device_bytes(state.params), layer.value
  matrices = layer.weights
  layers = model.num_layers * sum(matrices.values())
  # `linear` counts the weights that may have FP8 or BF16 copies: all weights of
  # the layers except the experts'.
  linear = layers
  if layer.experts:
    linear = model.num_layers * (matrices["qkv"] + matrices["out"])
  kept = model.num_layers * layer.saved(config.remat)
  is_cast = recipe.linear == "bf16" and value == F32
  if is_cast and not layer.is_on_mesh and config.remat == "none":
    kept += BF16 * linear  # Autodiff saves the weights' BF16 casts.
  cached = 0
  if recipe.linear == "fp8" and recipe.weight_cache == "codes":
    # FP8 weights are cached in row layout, which the backward pass reads, and
    # in column layout (transposed). The column layout is freed after the last
    # forward pass. With only one microbatch, this is before the peak.
    layouts = 1 if config.accumulate == 1 else 2
    weights_in_fp8 = layers if recipe.experts == "fp8" else linear
    cached = layouts * weights_in_fp8 / layer.fsdp  # One byte per value.
    if recipe.experts == "fp8" and layer.recomputes_experts and layouts == 1:
      # The backward pass recomputes gate and up, and for this it reads their
      # weight in column layout.
      cached += model.num_layers * matrices["gate_up"] / layer.fsdp
  summed = 0
  if config.accumulate > 1:  # Sums over microbatches stay allocated.
    itemsize = jnp.dtype(config.grad_accumulate).itemsize
    summed = weights * max(1, itemsize / value)
  of_layers, of_all = value * layers / layer.fsdp, weights
  zeros = 0
  if config.optimizer_in_backward:
    of_layers, of_all = 0, value * _head(layer) / layer.fsdp
  elif recipe.linear == "bf16" and not layer.is_on_mesh:
    # XLA allocates zeros for the gradient of a tied embedding before the loss.
    zeros = F32 * _head(layer) * model.tied_embeddings

  def memory(gradients: float, activations: float, temporary: float) -> Memory:
    return Memory(
      weights,
      round(gradients + summed),
      device_bytes(state.optimizer),
      round(activations),
      round(temporary + cached + zeros),
    )

  in_backward = layer_backward(layer) + _head_in_backward(layer)
  return {
    "loss": memory(0, kept, _loss_bytes(layer, batch, config.seq)),
    "backward": memory(of_layers, kept, in_backward),
    "embedding": memory(of_all, 0, _embedding_bytes(layer)),
  }


def _head(layer: Layer) -> int:
  """Counts the values of the output weights after their rows are gathered."""
  model: Any = layer.model
  return model.d_model * (model.vocab_size // layer.tensor)


def _loss_bytes(layer: Layer, batch: int, seq: int) -> float:
  """Counts the bytes of the loss's temporary arrays at their peak."""
  model: Any = layer.model
  head, columns = _head(layer), model.vocab_size // layer.tensor
  unit = BF16 * model.d_model * layer.tokens
  logits = batch * vocabulary.loss_positions(batch, seq, columns) * columns
  # The peak has these arrays:
  #   the logits in f32, and their gradient in BF16
  #   the gradient of the output weights in f32
  #   in BF16: hidden states, a copy of them in chunks, and their gradient
  total = (F32 + BF16) * logits + F32 * head + 3 * unit
  if layer.value == F32 or layer.is_on_mesh:
    total += BF16 * head  # The output weights in BF16, gathered on a mesh.
  if layer.value == BF16 and not layer.is_on_mesh:
    # The gradient of the output weights is rounded to BF16 after the logits are
    # freed, which may need more memory than the sum above.
    total = max(total, (F32 + BF16) * head + 2 * unit)
  return total


def _embedding_bytes(layer: Layer) -> float:
  """Counts the temporary bytes while the embedding's gradient is computed."""
  head = _head(layer)
  total: float = BF16 * head  # The gradient of the lookup.
  if layer.is_on_mesh:
    total += F32 * head  # The gradient in f32, before it is summed over GPUs.
    if layer.recipe.linear == "fp8" and not layer.optimizer_in_backward:
      total += layer.grad_value * layer.unsummed_last
  elif not layer.optimizer_in_backward:
    # If the embedding is tied to the output weights, the gradient from the loss
    # is in memory too.
    model: Any = layer.model
    total += F32 * head * model.tied_embeddings
  return total


def _head_in_backward(layer: Layer) -> float:
  """Counts the bytes of the output weights' gradient in the backward pass."""
  head = _head(layer)
  summed = layer.value * head / layer.fsdp  # This GPU's shard of the sum.
  model: Any = layer.model
  if not layer.optimizer_in_backward:
    if layer.recipe.linear == "bf16" and layer.is_recomputed:
      # Before XLA differentiates the layers, it allocates BF16 zeros for the
      # embedding's gradient. On one GPU, only a tied embedding has them.
      summed += BF16 * head * (layer.is_on_mesh or model.tied_embeddings)
    return summed
  # The optimizer has already updated untied output weights, and their gradient
  # is freed. The gradient of tied weights is still needed, because the gradient
  # of the lookup is added to it later. XLA may allocate zeros for the
  # embedding's gradient before it differentiates the layers.
  return summed * model.tied_embeddings + BF16 * head


def _plan_vision(
  config: TrainConfig, state: AbstractState, images_each: int
) -> dict[str, Memory]:
  """Plans the step of a vision-language model on one GPU."""
  for name, planned in _WITH_IMAGES.items():
    if (got := getattr(config, name)) != planned:
      raise ValueError(
        f"plan: plans of vision-language models do not support {name}, got "
        f"{name} {got}; leave {name} out"
      )
  model: Any = config.model
  trained: str = getattr(config, "trained")  # noqa: B009
  params, recipe, batch = state.params, config.coat_recipe(), config.batch
  decoder = AbstractState(params["decoder"], state.optimizer)
  points = _plan_decoder(config, model.text, decoder)
  if trained == "projector":
    loss, backward = points["loss"], points["backward"]
    head = F32 * model.text.d_model * model.text.vocab_size
    frozen = Layer(
      model=model.text, recipe=recipe, tokens=batch * config.seq, value=0
    )
    points = {
      "loss": loss._replace(temporary=loss.temporary - head),
      "backward": backward._replace(
        gradients=0, temporary=round(layer_backward(frozen))
      ),
    }
  images = batch * images_each
  tower = Layer(
    model=model.vision,
    recipe=recipe,
    tokens=images * model.vision.num_tokens,
    value=_value_bytes(params["tower"]),
  )
  # The step keeps the tower's features. It also keeps the projector's hidden
  # states: before GELU in BF16 and in f32, and after GELU in BF16.
  kept = images * model.tokens_each * BF16 * model.vision.d_model
  kept += images * model.tokens_each * (2 * BF16 + F32) * model.text.d_model
  if trained == "all":
    layers = model.feature_layer % (model.vision.num_layers + 1)
    kept += layers * tower.saved()
  weights = device_bytes(params)
  for name, memory in points.items():
    activations = memory.activations + round(kept)
    points[name] = memory._replace(weights=weights, activations=activations)
  if trained == "all":
    points["tower"] = points["embedding"]._replace(
      gradients=weights, temporary=round(layer_backward(tower))
    )
  return points


def _value_bytes(params: Any) -> int:
  """Returns the bytes per value of matrices; norms and biases may be wider."""
  widest = max(jax.tree.leaves(params), key=lambda leaf: leaf.size)
  return jnp.dtype(widest.dtype).itemsize
