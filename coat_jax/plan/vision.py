# SPDX-License-Identifier: Apache-2.0
"""The memory of a step of a vision-language model, moment by moment.

To the moments of its decoder comes one more, where the tower is trained:

  tower   all gradients of the decoder and the projector, what the tower's
          layers save, and the arrays of the one that is being differentiated

What is frozen has no gradients. A tower that is frozen, with all in front of
it, saves nothing; a decoder does, for what it saves leads to the projector.
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

# What is trained: the projector alone, the decoder too, or the tower too.
Trained = Literal["projector", "decoder", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
  """Images that one GPU works on at a time.

  Attributes:
    count: of all sequences, with those that are zeros.
    tower_tokens: of each, class token included.
    tokens: of each, that the projector has.

  Raises:
    ValueError: a number that is not at least 1, or no whole one.
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

  The step is as of `plan_step`, in recipe coat, with one microbatch, nothing
  computed again and the optimizer behind the backward.

  Args:
    decoder: its shape.
    tower: that of the tower's layers that are run: without a gate, with
      LayerNorm, and without a vocabulary, 0.
    recipe: of the layers of both.
    load: of the GPU: the sequences of the decoder.
    images: of them.
    trained: which parts are.
    params: trees `decoder`, `projector` and `tower` of `jax.ShapeDtypeStruct`s.
    optimizer_state: of what is trained.

  Returns:
    What is there at each of the moments of `plan_step`, and at "tower" where
    that is trained.

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
  # Features, hidden states in front of GELU in both dtypes, and behind it.
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
  """The moments without gradients of the decoder's weights."""
  head = F32 * decoder.d_model * decoder.vocab_size
  loss, backward = moments["loss"], moments["backward"]
  return {
    "loss": loss._replace(temporary=loss.temporary - head),
    "backward": backward._replace(
      gradients=0,
      temporary=round(layer_backward(decoder, recipe, load, value=0)),
    ),
  }
