# SPDX-License-Identifier: Apache-2.0
"""Defines how each kind of model is built, and its loss.

The type of a run's `model` selects the run's `Objective`. The rows of batches
come from `train.run.data.RunData`.
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

# The data of a batch: tokens, or arrays by name.
Rows = jax.Array | Mapping[str, jax.Array]
# A model's parameters, some parts of them, or a tree of the same structure.
Tree = dict[str, Any]
# The segment number that marks padding.
PADDING = 0


class AnyBatch(Protocol):
  """A batch: a tree of arrays [B, ...]."""

  @property
  def shares(self) -> jax.Array | None:
    """The targets' weights in the loss, f32 [B, ...]; None if all are equal."""


class Objective(abc.ABC):
  """Builds one kind of model, and computes the loss of its batches."""

  # Paths of the stacks of layers in the model's parameters.
  stacks: ClassVar[tuple[str, ...]] = ("layers",)
  # The class of the model; its first argument is the run's `model`.
  model: ClassVar[Callable[..., Any]]

  def build(self, config: TrainConfig, store: Callable | None = None) -> Any:
    """Builds the model with random weights, which the run's seed determines."""
    return self.model(
      config.model,
      recipe=config.coat_recipe(),
      dtype=jnp.dtype(config.compute),
      remat=config.remat,
      store=store,
      rngs=nnx.Rngs(config.seed),
    )

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    """Selects the trained parts; other parts have no gradients or moments."""
    del config
    return tree

  @abc.abstractmethod
  def batch_of(self, rows: Rows) -> AnyBatch:
    """Builds a whole step's batch, before it is split into microbatches."""

  @abc.abstractmethod
  def loss(self, model: Any, batch: Any) -> jax.Array:
    """Computes the loss of a batch or a microbatch, f32.

    If `batch.shares` is None, this is the mean loss of the targets. Otherwise
    each target's loss is multiplied by its share, and the products are summed,
    so that the losses of microbatches add up to the loss of the batch. In
    training, a mixture of experts adds its load-balancing loss.
    """

  def measure(self, model: Any, batch: Any) -> dict[str, jax.Array]:
    """Returns the `loss` of a held-out batch; subclasses may add metrics."""
    return {"loss": self.loss(model, batch)}

  def padding(self, batch: Any) -> jax.Array | None:
    """Computes the share of the inputs that is padding; None if always 0."""
    del batch


class NextToken(Objective):
  """Trains a decoder to predict each token from the tokens before it."""

  model = Decoder

  def batch_of(self, rows: Rows) -> Batch:
    return Batch.make(**rows) if isinstance(rows, Mapping) else Batch.of(rows)

  def loss(self, model: Decoder, batch: Batch) -> jax.Array:
    return loss_fn(model, batch)

  def padding(self, batch: Batch) -> jax.Array | None:
    segments = batch.input_segments
    return None if segments is None else jnp.mean(segments == PADDING)


class LabelledBatch(NamedTuple):
  """Images and their classes."""

  images: jax.Array  # f32 [B, C, H, W].
  labels: jax.Array  # int32 [B]; -1 for rows of padding.
  shares: jax.Array  # f32 [B]; equal for all images, 0 for rows of padding.


class ImageClass(Objective):
  """Trains a vision tower to classify images."""

  model = VisionTower

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
  # f32 [B, images, C, H, W], with the same number of images for each row; None
  # if no row has images.
  images: jax.Array | None

  @property
  def shares(self) -> jax.Array | None:
    return self.text.shares


class TokensAfterImages(Objective):
  """Trains a LLaVA to predict the text of sequences with images."""

  stacks = ("tower/layers", "decoder/layers")
  model = VisionLanguageModel

  # Maps `config.trained` to the trained parts of the parameters.
  _PARTS = {
    "projector": ("projector",),
    "decoder": ("projector", "decoder"),
    "all": ("tower", "projector", "decoder"),
  }

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    assert isinstance(config, FinetuneConfig)  # Only finetune trains a LLaVA.
    return {name: tree[name] for name in self._PARTS[config.trained]}

  def batch_of(self, rows: Rows) -> ImageBatch:
    assert isinstance(rows, Mapping)
    text = {name: x for name, x in rows.items() if name != "images"}
    return ImageBatch(Batch.make(**text), rows.get("images"))

  def loss(self, model: VisionLanguageModel, batch: ImageBatch) -> jax.Array:
    return loss_fn(model, batch.text, batch.images)

  def padding(self, batch: ImageBatch) -> jax.Array | None:
    return NextToken().padding(batch.text)


_OBJECTIVES: dict[type, Objective] = {
  ModelConfig: NextToken(),
  VisionConfig: ImageClass(),
  VisionLanguageConfig: TokensAfterImages(),
}


def objective_of(shape: Any) -> Objective:
  """Returns the objective for `shape`, the `model` of a run's options."""
  return _OBJECTIVES[type(shape)]


def trained(config: TrainConfig, tree: Tree) -> Tree:
  """Selects the trained parts of a tree that has the parameters' structure."""
  return objective_of(config.model).trained(config, tree)
