# SPDX-License-Identifier: Apache-2.0
"""What `train.finetune` learns from, as the training loop takes it."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grain
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.models.vision_language import VisionLanguageConfig
from train import pretrained
from train.data.chat import batches
from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder, open_template
from train.data.chat.ending import write_stop_tokens
from train.data.chat.packing import PackedRows, pack
from train.data.chat.template import ChatTemplate
from train.data.text import TokenizerText
from train.finetune_config import FinetuneConfig
from train.options import read_path
from train.run.data import OwnRows, RunData
from train.run.directory import RunDirectory
from train.run.exits import say
from train.samples import HeldOutSamples, Prompt

if TYPE_CHECKING:  # Which needs Pillow.
  from train.data.chat.images import ChatImages

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
# That read images of a batch each.
_THREADS = 8


def load(config: FinetuneConfig) -> tuple[FinetuneConfig, "Conversations"]:
  """Reads the conversations of a run.

  Args:
    config: The run, with its checkpoint's shape.

  Returns:
    The run with as many steps as its epochs take, and its data.

  Raises:
    FileNotFoundError, ValueError: the tokenizer, the template or a row cannot
      be used, or there are too few.
  """
  folder, data = pretrained.source_of(config), config.data
  if folder is None:
    raise ValueError(
      "finetune: needs a folder of transformers to begin with, got none; name "
      "it first"
    )
  template = open_template(folder, data.template)
  text, images = config.model, None
  if isinstance(text, VisionLanguageConfig):
    images = open_images(folder, text, data.images)
    text = text.text
  documents = load_documents(
    list(data.files),
    ChatEncoder(folder / TOKENIZER, template),
    seq=config.seq,
    vocab_size=text.vocab_size,
    format=data.format,
    skip_bad=data.skip_bad,
    images=images,
  )
  own, held_out = (
    pack(
      documents,
      numbers,
      seq=config.seq,
      seed=config.seed,
      is_packed=data.packing,
    )
    for numbers in documents.split(data.held_out, config.seed)
  )
  found = Conversations(
    rows=own,
    held_out=held_out,
    text=TokenizerText(str(folder / TOKENIZER)),
    template=template if data.template else None,
  )
  steps = config.steps or batches.count_steps(
    own, batch_size=config.batch, epochs=config.epochs
  )
  room = f" and {own.images} images" if own.images else ""
  say(
    f"{config.out}: {documents.counts.describe()}; {len(own)} sequences of "
    f"{config.seq} tokens{room} to train on, {1 - own.filled:.1%} padding; "
    f"{len(held_out)} held out; {steps} steps are "
    f"{steps * config.batch / len(own):.3g} epochs"
  )
  return dataclasses.replace(config, steps=steps), found


def open_images(
  folder: Path, shape: VisionLanguageConfig, images: str = ""
) -> "ChatImages":
  """Opens what reads images of conversations for a model.

  Args:
    folder: With the checkpoint's preprocessing.
    shape: The model's.
    images: Folder that names are relative to; "" for that of each file of rows.

  Returns:
    What `load_documents` takes as images.

  Raises:
    ValueError: Pillow is not installed, `images` is no folder, or images are
      preprocessed for another tower.
  """
  source = read_path("images", images) if images else None
  if source is not None and not source.is_dir():
    # Not left to the rows, which --skip-bad would leave out.
    raise ValueError(
      "images: a folder that names of images are relative to is needed, got "
      f"{source}, which is none; pass another --images, or leave it out where "
      "images are beside their file of rows"
    )
  try:  # As the extra `vision` installs it.
    from train.data.chat.images import ChatImages
    from train.data.images import Preprocessing
  except ImportError as error:
    raise ValueError(
      f"images: Pillow reads images, got {error}; install coat_jax[vision]"
    ) from error
  preprocessing = Preprocessing.load(folder)
  size = shape.vision.image_size
  if preprocessing.shape != (size, size) or shape.vision.num_channels != 3:
    made = " x ".join(map(str, (3, *preprocessing.shape)))
    raise ValueError(
      f"images: {folder} must make images of {shape.vision.num_channels} x "
      f"{size} x {size}, as its vision tower takes them, got {made}; pass a "
      "folder whose files belong together"
    )
  return ChatImages(
    preprocessing,
    token=shape.image_token,
    tokens_each=shape.tokens_each,
    folder=source,
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Conversations(RunData[FinetuneConfig]):
  """Conversations, packed into sequences.

  Attributes:
    rows: To train on.
    held_out: To evaluate.
    text: The tokenizer.
    template: That the run keeps beside the tokenizer, in place of its own; or
      None.
  """

  dtypes = {"tokens": np.int32, "segments": np.int32, "is_target": np.bool_}

  rows: PackedRows
  held_out: PackedRows
  text: TokenizerText
  template: ChatTemplate | None

  @property
  def fingerprint(self) -> str:
    return self.rows.documents.fingerprint

  def batch_shapes(
    self, config: FinetuneConfig
  ) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().batch_shapes(config)
    if (images := self.rows.documents.images) is not None:
      size = images.reader.preprocessing.shape
      shape = config.batch, self.rows.images, 3, *size
      shapes["images"] = jax.ShapeDtypeStruct(shape, np.float32)
    return shapes

  def train_batches(
    self, config: FinetuneConfig, **own_rows: int
  ) -> grain.DatasetIterator:
    found = batches.train_batches(
      self.rows, batch_size=config.batch, seed=config.seed, **own_rows
    )
    has_images = self.rows.documents.images is not None
    return batches.to_iterator(
      found.map(_named), threads=_THREADS if has_images else 0
    )

  def eval_batches(
    self, config: FinetuneConfig, **own_rows: int
  ) -> Iterable[OwnRows]:
    found = batches.eval_batches(
      self.held_out,
      batch_size=config.batch,
      max_batches=config.eval_batches,
      **own_rows,
    ).map(_named)
    if self.held_out.documents.images is None:
      return found
    return found.to_iter_dataset(
      grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_THREADS)
    )

  def keep_files(self, run: RunDirectory) -> None:
    if self.template is not None:
      (run.source / TEMPLATE).write_text(self.template.source, "utf-8")
    write_stop_tokens(run.source, self.rows.documents)

  def open_samples(
    self,
    config: FinetuneConfig,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    *,
    resumed_step: int,
  ) -> HeldOutSamples | None:
    run, most = RunDirectory(config.out), min(config.sample_tokens, config.seq)
    prompts = [*itertools.islice(self._prompts(), config.samples)]
    if config.samples and not prompts:
      say(
        f"{config.out}: no samples, for no held-out conversation has a prompt "
        "of text alone"
      )
    if not prompts:
      return None
    return HeldOutSamples(
      run.samples,
      prompts,
      self.text,
      graph=graph,
      mesh=mesh,
      most=most,
      resumed_step=resumed_step,
    )

  def _prompts(self) -> Iterator[Prompt]:
    """Yields the first prompt of each held-out conversation without images."""
    documents = self.held_out.documents
    for number in sorted(itertools.chain(*self.held_out.members)):
      if documents.images is not None and documents.images.of(number):
        continue
      start, end = documents.starts[number : number + 2]
      tokens, mask = documents.tokens[start:end], documents.mask[start:end]
      first = int(np.argmax(mask))
      count = int(np.argmin([*mask[first:], False]))
      yield Prompt(
        tokens[:first].tolist(), tokens[first : first + count].tolist()
      )


def _named(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """By the names of `Batch.make`, and images."""
  return {"is_target" if k == "mask" else k: x for k, x in batch.items()}
