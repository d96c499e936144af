# SPDX-License-Identifier: Apache-2.0
"""Objectives: the kinds of models that runs train, and their losses.

The type of a run's `model`, which the built model stores as its `config`,
selects its `Objective`. Objectives contain everything that the loop,
`train.step` and `train.update` need to know about models. Rows come from
`train.run.data.RunData`.
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
# A model's parameters, some parts of them, or a tree of that shape.
Tree = dict[str, Any]
# The segment number of padding.
PADDING = 0


class AnyBatch(Protocol):
  """A batch: a tree of arrays [B, ...]."""

  @property
  def shares(self) -> jax.Array | None:
    """The share of each target in the loss, f32 [B, ...]; shares add up to 1.

    None if all rows have equally many targets, which all count the same.
    """


class Objective(abc.ABC):
  """A kind of model, and the loss of its batches."""

  # Paths of stacked layers in the model's parameters.
  stacks: ClassVar[tuple[str, ...]] = ("layers",)
  # Builds the model from its shape.
  model: ClassVar[Callable[..., Any]]

  def build(self, config: TrainConfig, store: Callable | None = None) -> Any:
    """Builds the model with weights drawn from the run's seed."""
    return self.model(
      config.model,
      recipe=config.coat_recipe(),
      dtype=jnp.dtype(config.compute),
      remat=config.remat,
      store=store,
      rngs=nnx.Rngs(config.seed),
    )

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    """Selects the trained parts; the rest gets no gradients and no moments."""
    del config
    return tree

  @abc.abstractmethod
  def batch_of(self, rows: Rows) -> AnyBatch:
    """Makes the batch of a whole step, before it is split into microbatches."""

  @abc.abstractmethod
  def loss(self, model: Any, batch: Any) -> jax.Array:
    """Computes the loss of a batch or a microbatch, f32.

    It is the mean over the targets. If the batch has shares, it is the sum of
    losses times shares, so that losses of microbatches add up to that of the
    batch.
    """

  def measure(self, model: Any, batch: Any) -> dict[str, jax.Array]:
    """Computes the `loss` of a held-out batch, and maybe other measures."""
    return {"loss": self.loss(model, batch)}

  def padding(self, batch: Any) -> jax.Array | None:
    """Computes the share of the input that is padding; None without any."""
    del batch


class NextToken(Objective):
  """A decoder, which predicts each token from the tokens before it."""

  model = Decoder

  def batch_of(self, rows: Rows) -> Batch:
    # `Batch.make` gives all targets of the batch the same share, whatever
    # microbatch they are in.
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
  shares: jax.Array  # f32 [B]; all images count the same.


class ImageClass(Objective):
  """A vision tower that classifies images."""

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
  # f32 [B, I, C, H, W], for a `VisionLanguageModel`; None if no row has images.
  images: jax.Array | None

  @property
  def shares(self) -> jax.Array | None:
    """Returns the shares of the text's targets."""
    return self.text.shares


class TokensAfterImages(Objective):
  """A decoder that reads images where the text has image tokens."""

  stacks = ("tower/layers", "decoder/layers")
  model = VisionLanguageModel

  # The trained parts of the parameters, by `config.trained`.
  _PARTS = {
    "projector": ("projector",),
    "decoder": ("projector", "decoder"),
    "all": ("tower", "projector", "decoder"),
  }

  def trained(self, config: TrainConfig, tree: Tree) -> Tree:
    assert isinstance(config, FinetuneConfig)  # Only these runs see images.
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
  """Looks up the objective of a model's shape."""
  return _OBJECTIVES[type(shape)]


def trained(config: TrainConfig, tree: Tree) -> Tree:
  """Selects the trained parts of a parameter-shaped tree of a run."""
  return objective_of(config.model).trained(config, tree)
