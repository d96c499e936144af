# SPDX-License-Identifier: Apache-2.0
"""Objectives: the kinds of models that runs train, and their losses.

An `Objective` belongs to a kind of shape, the type of a run's `model` and of
the built model's `config`. The loop, `train.step` and `train.update` know no
more of a model than is here; a run's data give the rows
(`train.run.data.RunData`).
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from coat_jax.models import VisionConfig, VisionTower
from coat_jax.models.batch import Batch
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from coat_jax.models.vision_language import (
  VisionLanguageConfig,
  VisionLanguageModel,
)
from train.config import TrainConfig
from train.finetune_config import FinetuneConfig

# A run's data: tokens, or arrays by name.
Rows = jax.Array | Mapping[str, jax.Array]
# Like a model's parameters, or some parts of them.
Tree = dict[str, Any]
# The segment number of padding.
PADDING = 0


class AnyBatch(Protocol):
  """A batch: a tree of arrays [B, ...].

  Attributes:
    shares: f32 [B, ...], how much each target counts, which add up to 1 in the
      whole batch; None where it has as many targets in each row, alike.
  """

  @property
  def shares(self) -> jax.Array | None: ...


class Objective(abc.ABC):
  """A kind of model, and the loss of its batches."""

  # Paths of stacked layers in the model's parameters.
  stacks: ClassVar[tuple[str, ...]] = ("layers",)

  @abc.abstractmethod
  def build(self, config: TrainConfig, store: Callable | None = None) -> Any:
    """Builds the model with weights drawn from the run's seed."""

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    """Selects the trained parts of a parameter-shaped tree.

    What is frozen has no gradient and no state of an optimizer.
    """
    del config
    return tree

  @abc.abstractmethod
  def batch_of(self, rows: Rows) -> AnyBatch:
    """Makes a step's batch, whole, before it is split into microbatches."""

  @abc.abstractmethod
  def loss(self, model: Any, batch: Any) -> jax.Array:
    """Computes what training lowers, f32.

    Args:
      model: From `build`.
      batch: From `batch_of`, or a microbatch of it.

    Returns:
      The mean over the targets; where the batch has shares, the sum of losses
      times shares, so that those of microbatches add up to the batch's.
    """

  def measure(self, model: Any, batch: Any) -> dict[str, jax.Array]:
    """Measures a held-out batch, as `loss` does."""
    return {"loss": self.loss(model, batch)}

  def padding(self, batch: Any) -> jax.Array | None:
    """Computes the share of the input that is padding; None without any."""
    del batch


class NextToken(Objective):
  """A decoder, which predicts each token from those in front of it."""

  def build(
    self, config: TrainConfig, store: Callable | None = None
  ) -> Decoder:
    return Decoder(config.model, **_options(config, store))

  def batch_of(self, rows: Rows) -> Batch:
    # Of what `Batch.make` takes, each target counts alike, in whatever
    # microbatch it is.
    return Batch.make(**rows) if isinstance(rows, Mapping) else Batch.of(rows)

  def loss(self, model: Decoder, batch: Batch) -> jax.Array:
    return loss_fn(model, batch)

  def padding(self, batch: Batch) -> jax.Array | None:
    return _padding(batch)


class LabelledBatch(NamedTuple):
  """Images and their classes."""

  images: jax.Array  # f32 [B, C, H, W].
  labels: jax.Array  # int32 [B]; -1 of what fills a batch up.
  shares: jax.Array  # f32 [B]; all images count alike.


class ImageClass(Objective):
  """A vision tower with classes, which says what is in an image."""

  def build(
    self, config: TrainConfig, store: Callable | None = None
  ) -> VisionTower:
    assert isinstance(config.model, VisionConfig)
    return VisionTower(config.model, **_options(config, store))

  def batch_of(self, rows: Rows) -> LabelledBatch:
    assert isinstance(rows, Mapping)
    is_image = rows["labels"] >= 0
    shares = is_image / jnp.maximum(jnp.sum(is_image), 1)
    return LabelledBatch(
      rows["images"], rows["labels"], shares.astype(jnp.float32)
    )

  def loss(self, model: VisionTower, batch: LabelledBatch) -> jax.Array:
    return self.measure(model, batch)["loss"]

  def measure(
    self, model: VisionTower, batch: LabelledBatch
  ) -> dict[str, jax.Array]:
    logits, labels = model(batch.images), jnp.maximum(batch.labels, 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = jnp.argmax(logits, axis=-1) == labels
    return {
      "loss": jnp.sum(nats * batch.shares),
      "accuracy": jnp.sum(is_right * batch.shares),
    }


class ImageBatch(NamedTuple):
  """Sequences with images."""

  text: Batch
  # f32 [B, I, C, H, W], as a `VisionLanguageModel` takes them, or None where no
  # row has any.
  images: jax.Array | None

  @property
  def shares(self) -> jax.Array | None:
    """Shares of the text's targets."""
    return self.text.shares


class TokensAfterImages(Objective):
  """A decoder that sees images in the place of some tokens."""

  stacks = ("tower/layers", "decoder/layers")

  # At the top of a `VisionLanguageModel`'s parameters, by `config.trained`.
  _PARTS = {
    "projector": ("projector",),
    "decoder": ("projector", "decoder"),
    "all": ("tower", "projector", "decoder"),
  }

  def build(
    self, config: TrainConfig, store: Callable | None = None
  ) -> VisionLanguageModel:
    return VisionLanguageModel(config.model, **_options(config, store))

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    assert isinstance(config, FinetuneConfig)  # No other has such a model.
    return {name: tree[name] for name in self._PARTS[config.trained]}

  def batch_of(self, rows: Rows) -> ImageBatch:
    assert isinstance(rows, Mapping)
    text = {name: x for name, x in rows.items() if name != "images"}
    return ImageBatch(Batch.make(**text), rows.get("images"))

  def loss(self, model: VisionLanguageModel, batch: ImageBatch) -> jax.Array:
    return loss_fn(model, batch.text, batch.images)

  def padding(self, batch: ImageBatch) -> jax.Array | None:
    return _padding(batch.text)


def _options(config: TrainConfig, store: Callable | None) -> dict[str, Any]:
  """How a model is built."""
  return dict(
    recipe=config.coat_recipe(),
    dtype=config.compute_dtype,
    remat=config.remat,
    store=store,
    rngs=nnx.Rngs(config.seed),
  )


def _padding(batch: Batch) -> jax.Array | None:
  segments = batch.input_segments
  return None if segments is None else jnp.mean(segments == PADDING)


_OBJECTIVES: dict[type, Objective] = {
  ModelConfig: NextToken(),
  VisionConfig: ImageClass(),
  VisionLanguageConfig: TokensAfterImages(),
}


def objective_of(shape: Any) -> Objective:
  """Looks up what is trained of a model."""
  return _OBJECTIVES[type(shape)]


def trained(config: TrainConfig, tree: Tree) -> Tree:
  """Selects the trained parts of a parameter-shaped tree of a run."""
  return objective_of(config.model).trained(config, tree)
