# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a step of a vision-language model.

If the tower is trained, there is one more point besides those of the decoder:

  tower   all gradients of the decoder and the projector, what the tower's
          layers save, and the arrays of the layer that is being differentiated

Frozen parts have no gradients. A frozen tower saves nothing, nor does anything
before it. A frozen decoder does save, because its backward leads to the
projector.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from coat_jax.checks import check_choice, check_kind, refuse
from coat_jax.models.ranges import Count, check_numbers
from coat_jax.plan.backward import layer_backward
from coat_jax.plan.decoder import (
  BF16,
  F32,
  DecoderShape,
  Load,
  check_shape,
  kept_bytes,
)
from coat_jax.plan.step import Memory, device_bytes, plan_step, value_bytes
from coat_jax.recipe import CoatRecipe

# What is trained: only the projector, the decoder too, or also the tower.
Trained = Literal["projector", "decoder", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
  """The images that one GPU works on at a time.

  Attributes:
    count: number of images of all sequences, including those that are zeros.
    tower_tokens: tokens per image in the tower, including the class token.
    tokens: tokens per image in the projector.

  Raises:
    ValueError: a number is not whole or below 1.
  """

  count: Count
  tower_tokens: Count
  tokens: Count

  def __post_init__(self):
    check_numbers(self)


def plan_vision_step(
  decoder: DecoderShape,
  tower: DecoderShape,
  recipe: CoatRecipe,
  load: Load,
  images: Images,
  *,
  trained: Trained,
  params: Any,
  optimizer_state: Any,
) -> dict[str, Memory]:
  """Plans the memory of a training step on one GPU.

  The step is like that of `plan_step`, with recipe coat, one microbatch, no
  recomputation, and the optimizer after the backward.

  Args:
    decoder: the decoder's dimensions.
    tower: dimensions of the tower layers that run: without a gate, with
      LayerNorm, and with a vocabulary of 0.
    recipe: the recipe of the layers of both.
    load: the work of the GPU: the decoder's sequences.
    images: the images of these sequences.
    trained: which parts are trained.
    params: trees `decoder`, `projector` and `tower` of `jax.ShapeDtypeStruct`s.
    optimizer_state: the optimizer's state for the trained parts.

  Returns:
    The memory at each of the points of `plan_step`, and at "tower" if the tower
    is trained.

  Raises:
    NotImplementedError: another recipe, or a load that is not planned.
    TypeError: an argument of another kind.
    ValueError: an unknown `trained`, or a part of the parameters is missing.
  """
  op = "plan_vision_step"
  check_shape(op, decoder, recipe)
  check_shape(op, tower, recipe)
  check_kind(op, "load", load, Load, "pass one, as in Load(batch=8, seq=2048)")
  remedy = "pass one, as in Images(count=8, tower_tokens=577, tokens=576)"
  check_kind(op, "images", images, Images, remedy)
  check_choice(op, "trained", trained, get_args(Trained))
  parts = ("decoder", "projector", "tower")
  if not isinstance(params, Mapping) or not {*parts} <= params.keys():
    remedy = "pass the parameters of a VisionLanguageModel"
    refuse(ValueError, op, "params", f"trees {parts}", params, remedy)
  if recipe.nonlinear != "fp8" or load != Load(
    batch=load.batch, seq=load.seq, loss_positions=load.loss_positions
  ):
    raise NotImplementedError(
      "plan_vision_step: plans recipe coat on one GPU, in one microbatch and "
      f"with remat none, got recipe {recipe.name} and {load}; compile the step"
    )
  moments = plan_step(
    decoder,
    recipe,
    load,
    params=params["decoder"],
    optimizer_state=optimizer_state,
  )
  weights = device_bytes(params)
  # Features; hidden states before GELU in both dtypes, and after it.
  projected = images.count * images.tokens
  kept = projected * (BF16 * tower.d_model + (2 * BF16 + F32) * decoder.d_model)
  of_tower = Load(batch=images.count, seq=images.tower_tokens)
  if trained == "all":
    kept += tower.num_layers * kept_bytes(tower, recipe) * of_tower.tokens
  if trained == "projector":
    moments = _of_frozen_decoder(moments, decoder, recipe, load)
  found = {
    name: memory._replace(
      weights=weights, activations=memory.activations + round(kept)
    )
    for name, memory in moments.items()
  }
  if trained == "all":
    gradients = device_bytes(params)
    value = value_bytes(params["tower"])
    temporary = layer_backward(tower, recipe, of_tower, value=value)
    found["tower"] = found["embedding"]._replace(
      gradients=gradients, temporary=round(temporary)
    )
  return found


def _of_frozen_decoder(
  moments: dict[str, Memory],
  decoder: DecoderShape,
  recipe: CoatRecipe,
  load: Load,
) -> dict[str, Memory]:
  """Returns the points without gradients of the decoder's weights."""
  head = F32 * decoder.d_model * decoder.vocab_size
  loss, backward = moments["loss"], moments["backward"]
  return {
    "loss": loss._replace(temporary=loss.temporary - head),
    "backward": backward._replace(
      gradients=0,
      temporary=round(layer_backward(decoder, recipe, load, value=0)),
    ),
  }
