# SPDX-License-Identifier: Apache-2.0
"""The training loss: cross-entropy, plus load balancing of experts."""

import jax
from jax import Array

from coat_jax.layers import RoutingStats, load_balancing_loss, vocabulary
from coat_jax.models.batch import Batch
from coat_jax.models.decoder import Decoder
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.numerics.checks import check_kind


def loss_fn(
  model: Decoder | VisionLanguageModel,
  batch: Batch | Array,
  pixel_values: Array | None = None,
) -> Array:
  """Computes the mean cross-entropy of the next token.

  In training, adds the load-balancing loss if the model has experts.

  If you split a batch into microbatches, their `target_shares` must add up to 1
  over all microbatches. The sum of the losses is then the mean cross-entropy of
  the whole batch, plus an average of the load-balancing losses.

  Args:
    model: a Decoder or VisionLanguageModel. After `model.eval()` the result is
      the cross-entropy alone.
    batch: a `Batch`, or int32 [B, T + 1] if all tokens except the first of each
      sequence are targets.
    pixel_values: images, as for `VisionLanguageModel`; None for text alone.

  Returns:
    The loss, an f32 scalar in nats per target.

  Raises:
    TypeError: the model or an array has the wrong type.
    ValueError: the batch has the wrong shape, or images are passed with a
      Decoder.
  """
  op, kinds = "loss_fn", (Decoder, VisionLanguageModel)
  check_kind(op, "model", model, kinds, "pass a model that reads tokens")
  batch = Batch.of(batch)
  if isinstance(model, VisionLanguageModel):
    hidden, routing = model.routed(
      batch.inputs, pixel_values, batch.input_segments
    )
    return loss_of_hidden(model.decoder, hidden, batch, routing)
  if pixel_values is not None:
    raise ValueError(
      "loss_fn: images need a VisionLanguageModel, got a Decoder with images; "
      "leave pixel_values out"
    )
  hidden, routing = model.routed(batch.inputs, batch.input_segments)
  return loss_of_hidden(model, hidden, batch, routing)


def loss_of_hidden(
  model: Decoder,
  hidden: Array,
  batch: Batch,
  routing: RoutingStats | None = None,
) -> Array:
  """Computes `loss_fn` from the model's hidden states [B, T, D].

  As in Hugging Face Transformers, one load-balancing loss covers all layers and
  counts all tokens, including padding. For each microbatch, it is
  multiplied by the sum of the microbatch's `target_shares`. So its sum over all
  microbatches is a weighted average.
  """
  config, shares = model.config, batch.target_shares
  loss = vocabulary.mean_loss(
    hidden,
    batch.targets,
    model.output_weight[...],
    shares,
    is_tied=model.head is None,
    axes=model.axes,
    soft_cap=config.logits_soft_cap,
  )
  is_training = not model.layers.attention.deterministic
  if routing is None or not config.auxiliary_loss or not is_training:
    return loss
  means = jax.tree.map(lambda x: x / config.num_layers, routing)
  auxiliary = config.auxiliary_loss * load_balancing_loss(means)
  return loss + (auxiliary if shares is None else auxiliary * shares.sum())
