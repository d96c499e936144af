# SPDX-License-Identifier: Apache-2.0
"""The configuration of a fine-tuning run.

That of `train.config` with other defaults, conversations for data, and epochs:
`python -m train.finetune` reads it from the command line.

None of these was tuned here. Of section 3.1 of arXiv:2307.09288 (Llama 2) are
the peak of 2e-5 and the cosine, here to a tenth of the peak. (Weights in BF16
were as good as f32 at constant rates of 1e-5 and 2e-6, docs/optimizer.md.)
Others are chosen by argument:
  * warmup over 3 % of the steps: moments begin at nothing;
  * no weight decay: 0.1 would shrink weights by a thousandth in 500 steps at
    2e-5, away from what pretraining made them;
  * b2 of 0.95, not 0.999: a run of some hundred steps is shorter than the
    thousand that 0.999 averages over, and the errors of second moments that are
    stored in 8 bits and rounded in each step last as long.
Of a model that sees images the tower is frozen, as in LLaVA's second stage
(arXiv:2304.08485, section 4.2): conversations say little about what an image
looks like, and the tower needs no backward then.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import Fixed, OmitArgPrefixes, Positional, Suppress, arg

from coat_jax.models.config import ModelConfig
from coat_jax.models.ranges import Count, Range, check_numbers
from coat_jax.models.vision_language import VisionLanguageConfig
from train.config import TrainConfig
from train.data.chat.formats import FORMATS
from train.data.chat.template import PUBLISHED
from train.mesh import check_tower_fits
from train.optim_config import OptimConfig
from train.options import FIXED, SILENT
from train.presets import finetune

Format = tyro.extras.literal_type_from_choices(FORMATS)
Template = tyro.extras.literal_type_from_choices(PUBLISHED)
Trained = Literal["projector", "decoder", "all"]
# Of what a held-out share can be: neither nothing nor all.
_Share = Annotated[float, Range(1e-6, 0.999999)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatData:
  """Conversations to learn from.

  Attributes:
    files: Files of conversations, as JSON lines or one JSON array; folders and
      globs work too.
    format: How rows are written; by default each file's first row decides.
    template: A known chat template to use instead of the tokenizer's own.
    held_out: Share of the conversations to hold out for evaluation, at least
      one.
    packing: Whether conversations share a sequence, as many as fit, without
      seeing each other. --no-packing pads each to a sequence of its own.
    skip_bad: Leave out rows that cannot be learned from, and count them.
    images: With a LLaVA, the folder that image names are relative to; by
      default the folder of each file of rows.
  """

  # As of `DataConfig`: these are ids of the tokenizer that the run keeps.
  dtype: ClassVar[str] = "chat"
  tokenizer: ClassVar[None] = None

  files: Annotated[tuple[str, ...], arg(name="data", metavar="FILES")] = ()
  format: Format | None = None  # pyright: ignore[reportInvalidTypeForm]
  template: Template | None = None  # pyright: ignore[reportInvalidTypeForm]
  held_out: _Share = dataclasses.field(default=0.05, metadata=FIXED)
  packing: bool = dataclasses.field(default=True, metadata=FIXED)
  skip_bad: bool = False
  images: str = ""

  def __post_init__(self):
    check_numbers(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
  """A fine-tuning run: all options of a training run, and these.

  Attributes:
    init_from: The checkpoint to start from: a Hugging Face checkpoint, or a run
      that started from one. The run takes its weights, shape, tokenizer and
      chat template.
    data: Conversations to learn from.
    trained: With a LLaVA, which parts are trained: the projector (its first
      stage), the decoder too (its second), or all, with the vision tower. The
      others have neither gradients nor optimizer state.
    steps: Optimizer steps of the whole run; 0 for as many as epochs take.
    epochs: How often to learn from each conversation, instead of steps.
    samples: How many held-out prompts each evaluation answers, for a person to
      read; 0 for none.
    sample_tokens: The most tokens of a sample's answer.
  """

  init_from: Annotated[Positional[str], arg(metavar="DIR")] = dataclasses.field(
    metadata=SILENT
  )
  # No shared code reads it.
  data: OmitArgPrefixes[ChatData] = dataclasses.field(  # pyright: ignore[reportIncompatibleVariableOverride]
    default=ChatData(), metadata=SILENT
  )
  model: Suppress[Fixed[ModelConfig | VisionLanguageConfig]] = (  # pyright: ignore[reportIncompatibleVariableOverride]
    dataclasses.field(default=finetune().model, metadata=FIXED)
  )
  trained: Trained = dataclasses.field(default="decoder", metadata=FIXED)
  optim: OptimConfig = OptimConfig(
    lr=2e-5, warmup=0.03, min_lr_ratio=0.1, weight_decay=0.0
  )
  steps: Annotated[int, Range(0, 2**31 - 1)] = 0
  epochs: Annotated[float, Range(1e-6, 1e6)] = dataclasses.field(
    default=3.0, metadata=SILENT
  )
  batch: Count = dataclasses.field(default=16, metadata=FIXED)
  seq: Count = dataclasses.field(default=2048, metadata=FIXED)
  eval_every: Count = dataclasses.field(default=100, metadata=SILENT)
  eval_batches: Count = dataclasses.field(default=64, metadata=SILENT)
  save_every: Count = dataclasses.field(default=500, metadata=SILENT)
  samples: Annotated[int, Range(0, 64)] = dataclasses.field(
    default=2, metadata=SILENT
  )
  sample_tokens: Count = dataclasses.field(default=128, metadata=SILENT)

  def __post_init__(self):
    super().__post_init__()
    if not self.samples and self.sample_tokens != type(self).sample_tokens:
      raise ValueError(
        "FinetuneConfig: sample_tokens applies to samples, got 0 of them; "
        "leave it out"
      )
    if self.samples and self.distributed:
      raise ValueError(
        "FinetuneConfig: samples are generated by one process, got "
        "distributed; pass --samples 0"
      )

  def check_mesh(self):
    model = self.model
    if not isinstance(model, VisionLanguageConfig):
      self._check_text()
      super().check_mesh()
      return
    self._check_decoders_own()
    # The whole run, to say it in the same words.
    of_text: dict[str, Any] = dict(model=model.text, trained="decoder")
    data = dataclasses.replace(self.data, images="")
    dataclasses.replace(self, data=data, **of_text).check_mesh()
    check_tower_fits(self.mesh_sizes, model.vision)

  def _check_text(self):
    """Raises where an option is for images."""
    for name, is_set in {
      "images": self.data.images,
      "trained": self.trained != "decoder",
    }.items():
      if is_set:
        raise ValueError(
          f"FinetuneConfig: {name} is of models that see images, got it with "
          f"a {self.model.family} of text alone; leave it out, or name the "
          "folder of a LLaVA"
        )

  def _check_decoders_own(self):
    """Raises where an option knows the parameters of a decoder alone."""
    for name, is_set in {
      "optimizer_in_backward": self.optimizer_in_backward,
      "optim.optimizer coat_muon": self.optim.optimizer == "coat_muon",
      "watch": self.watch,
    }.items():
      if is_set:
        raise ValueError(
          f"FinetuneConfig: {name} is for a decoder alone, got a model with a "
          "vision tower; leave it out"
        )

  def _check_steps(self):
    if self.steps:  # Else the data will say how many.
      super()._check_steps()
