# SPDX-License-Identifier: Apache-2.0
"""Prepares conversations for `train.finetune`, and writes sample answers.

At each evaluation the model answers some held-out prompts by greedy decoding.
Each answer becomes a line of samples.jsonl in the run's folder, with the keys
`step`, `sample` (the prompt's number), `prompt`, `answer`, and `reference` (the
answer in the data).
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.models import generate
from coat_jax.models.vision_language import VisionLanguageConfig
from train import pretrained
from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.packing import PackedRows, pack
from train.data.chat.template import ChatTemplate
from train.data.text import Text, TokenizerText, write_stop_tokens
from train.finetune_config import FinetuneConfig
from train.options import read_path
from train.run.data import RunData
from train.run.directory import RunDirectory
from train.run.exits import say
from train.run.metrics import MetricsLog
from train.source import decoder_of

if TYPE_CHECKING:  # Needs Pillow.
  from train.data.chat.images import ChatImages

# Characters to print from the end of a prompt and the start of an answer.
_SHOWN = 160
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
_THREADS = 8  # Each thread reads the images of one batch.
_EPOCHS = 3  # The default if neither --steps nor --epochs is set.


def load(config: FinetuneConfig) -> tuple[FinetuneConfig, "Conversations"]:
  """Reads conversations, prints counts, and replaces `epochs` with `steps`."""
  folder, data = pretrained.source_of(config), config.data
  if folder is None:
    raise ValueError(
      "finetune: expected a Hugging Face folder to start from, got none; pass "
      "it as the first argument"
    )
  template = ChatTemplate.load(folder, data.template)
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
    fingerprint=documents.fingerprint,
    threads=0 if images is None else _THREADS,
    text=TokenizerText(str(folder / TOKENIZER)),
    template=template if data.template else None,
  )
  epochs = config.epochs or _EPOCHS
  steps = config.steps or math.ceil(len(own) * epochs / config.batch)
  room = f", with room for {own.images} images each" if own.images else ""
  say(
    f"{config.out}: {documents.counts.describe()}; {len(own)} sequences of "
    f"{config.seq} tokens to train on, {1 - own.filled:.1%} padding{room}; "
    f"{len(held_out)} sequences held out; {steps} steps are "
    f"{steps * config.batch / len(own):.3g} epochs"
  )
  return dataclasses.replace(config, steps=steps, epochs=None), found


def open_images(
  folder: Path, shape: VisionLanguageConfig, images: str = ""
) -> "ChatImages":
  """Opens the reader for the images in conversations."""
  source = read_path("images", images) if images else None
  if source is not None and not source.is_dir():
    # Otherwise, --skip-bad would skip all conversations with images.
    raise ValueError(
      "images: expected the folder that image names are relative to, got "
      f"{source}, which is not a folder; pass an existing folder as --images, "
      "or leave --images out if image names are relative to the folder of the "
      "conversations' file"
    )
  try:
    from train.data.chat.images import ChatImages
    from train.data.images import Preprocessing
  except ImportError as error:
    raise ValueError(
      f"images: could not import Pillow ({error}); run pip install '.[vision]'"
    ) from error
  preprocessing = Preprocessing.load(folder)
  size = shape.vision.image_size
  if preprocessing.shape != (size, size) or shape.vision.num_channels != 3:
    made = " x ".join(map(str, (3, *preprocessing.shape)))
    raise ValueError(
      f"images: the vision tower of {folder} needs images of "
      f"{shape.vision.num_channels} x {size} x {size}, but its preprocessing "
      f"makes images of {made}; pass a folder whose files are all from one "
      "model"
    )
  return ChatImages(
    preprocessing,
    token=shape.image_token,
    tokens_each=shape.tokens_each,
    folder=source,
  )


class Prompt(NamedTuple):
  """A held-out prompt."""

  tokens: list[int]  # The tokens before the answer.
  reference: list[int]  # The answer in the data.


class HeldOutSamples:
  """Generates answers and writes them to a run's samples.jsonl."""

  def __init__(
    self,
    path: Path,
    prompts: Sequence[Prompt],
    text: Text,
    *,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    most: int,
    resumed_step: int,
  ):
    self._prompts, self._text = prompts, text
    self._graph, self._mesh, self._most = graph, mesh, most
    self._stops = text.stops_after(x.reference[-1] for x in prompts)
    self._log = MetricsLog(path, resumed_step=resumed_step)

  def write(self, step: int, params: Any) -> list[str]:
    """Generates and writes a step's answers; returns lines to print."""
    context = contextlib.nullcontext()
    if self._mesh is not None:
      context = jax.set_mesh(self._mesh)
    # No prompt has images, so a LLaVA needs only its decoder here.
    model = decoder_of(nnx.merge(self._graph, params))
    try:
      with context:
        found = generate(
          model,
          [prompt.tokens for prompt in self._prompts],
          max_new_tokens=self._most,
          stop_tokens=self._stops,
        )
    except ValueError as error:  # The logits are not finite.
      return [f"  samples: {error}"]
    lines, decode = [], self._text.decode
    for i, prompt in enumerate(self._prompts):
      asked, answer = decode(prompt.tokens), decode(found.tokens[i])
      reference = decode(prompt.reference)
      self._log.write(
        step=step, sample=i, prompt=asked, answer=answer, reference=reference
      )
      asked, answer = (" ".join(text.split()) for text in (asked, answer))
      lines.append(f"  sample {i}: {asked[-_SHOWN:]} => {answer[:_SHOWN]}")
    return lines

  def close(self) -> None:
    self._log.close()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Conversations(RunData[FinetuneConfig]):
  """Conversations, packed into sequences."""

  rows: PackedRows
  held_out: PackedRows
  text: TokenizerText
  # A chat template to write into the run's folder; None to use the tokenizer's.
  template: ChatTemplate | None

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
        f"{config.out}: no samples, because all held-out conversations have "
        "images"
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
      if documents.images_of(number):
        continue
      tokens, mask = documents.tokens_of(number)
      first = int(np.argmax(mask))
      count = int(np.argmin([*mask[first:], False]))
      yield Prompt(
        tokens[:first].tolist(), tokens[first : first + count].tolist()
      )
