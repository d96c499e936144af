# SPDX-License-Identifier: Apache-2.0
"""The configuration of a fine-tuning run, which `train.finetune` reads.

Some defaults differ from those of `train.config`; none is tuned. The peak
learning rate of 2e-5 and the cosine schedule come from arXiv:2307.09288
(Llama 2), section 3.1; here the cosine ends at a tenth of the peak. The reasons
for the other defaults are:
  * warmup over 3 % of the steps, because early moments average few gradients;
  * no weight decay: at a rate of 2e-5, a decay of 0.1 would shrink the
    pretrained weights by a thousandth in 500 steps;
  * b2 of 0.95 instead of 0.999: a run of a few hundred steps is shorter than
    the thousand steps that 0.999 averages over, and errors from rounding second
    moments to 8 bits would also last for a thousand steps;
  * a frozen vision tower, as in LLaVA's second stage (arXiv:2304.08485, section
    4.2): conversations say little about what an image looks like, and a frozen
    tower needs no backward pass.
"""

import dataclasses
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Fixed, OmitArgPrefixes, Positional, Suppress, arg

from coat_jax.models.config import ModelConfig
from coat_jax.models.ranges import Count, Range, check_fields
from coat_jax.models.vision_language import VisionLanguageConfig
from train.config import TrainConfig
from train.data.chat.formats import FORMATS
from train.data.chat.template import PUBLISHED
from train.mesh import check_tower_fits
from train.optim_config import OptimConfig
from train.options import Flag, Share, fixed, shown, silent
from train.presets import finetune

Format = tyro.extras.literal_type_from_choices(FORMATS)
Template = tyro.extras.literal_type_from_choices(PUBLISHED)
Trained = Literal["projector", "decoder", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatData:
  """Conversations to learn from.

  Attributes:
    files: Files of conversations, as JSON lines or one JSON array; folders and
      globs work too.
    format: The format of the rows.
    template: Name of a published chat template to use.
    held_out: Share of the conversations to hold out for evaluation, at most
      0.5. At least one conversation is held out.
    packing: Put as many conversations into a sequence as fit; they do not
      attend to each other. --no-packing gives each conversation its own
      sequence.
    skip_bad: Skip rows that cannot be trained on, and print how many.
    images: With a LLaVA, the folder that image names are relative to.
  """

  files: Annotated[
    tuple[str, ...], shown("required", name="data", metavar="FILES")
  ] = ()
  format: Annotated[
    Format | None,  # pyright: ignore[reportInvalidTypeForm]
    shown("default: the first row of each file decides"),
  ] = None
  template: Annotated[
    Template | None,  # pyright: ignore[reportInvalidTypeForm]
    shown("default: the tokenizer's own"),
  ] = None
  held_out: Share = fixed(0.05)
  packing: bool = fixed(True)
  skip_bad: Flag = False
  images: Annotated[str, shown("default: the folder of each file")] = ""

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
  """A fine-tuning run: all options of a training run, plus these.

  Attributes:
    init_from: The checkpoint to start from: a Hugging Face checkpoint, or a run
      that started from one. Weights, shape, tokenizer and chat template are
      those of the checkpoint.
    data: Conversations to learn from.
    trained: Which parts of a LLaVA to train. `projector` (the first stage)
      trains only the projector, `decoder` (the second stage) also the decoder,
      and `all` also the vision tower. Frozen parts have no gradients and no
      moments.
    steps: Number of optimizer steps of the whole run; if 0, epochs determines
      this number.
    epochs: Number of passes over the conversations; cannot be combined with
      steps.
    samples: How many held-out prompts the model answers at each evaluation, for
      a person to read; 0 for none.
    sample_tokens: Maximum number of tokens in a sample's answer.
  """

  init_from: Annotated[Positional[str], arg(metavar="DIR")] = silent()
  data: OmitArgPrefixes[ChatData] = silent(ChatData())  # pyright: ignore[reportIncompatibleVariableOverride]
  model: Suppress[Fixed[ModelConfig | VisionLanguageConfig]] = fixed(  # pyright: ignore[reportIncompatibleVariableOverride]
    finetune().model
  )
  trained: Trained = fixed("decoder")
  optim: OptimConfig = OptimConfig(
    lr=2e-5, warmup=0.03, min_lr_ratio=0.1, weight_decay=0.0
  )
  steps: Annotated[int, Range(0, 2**31 - 1)] = 0
  epochs: Annotated[
    Annotated[float, Range(1e-6, 1e6)] | None, shown("default: 3")
  ] = silent(None)
  batch: Count = fixed(16)
  seq: Count = fixed(2048)
  eval_every: Count = silent(100)
  eval_batches: Count = 64
  save_every: Count = silent(500)
  samples: Annotated[int, Range(0, 64)] = silent(2)
  sample_tokens: Count = silent(128)

  def __post_init__(self):
    super().__post_init__()
    if self.steps and self.epochs is not None:
      raise ValueError(
        "FinetuneConfig: epochs and steps are mutually exclusive, got both; "
        "leave one out"
      )
    if not self.samples and self.sample_tokens != type(self).sample_tokens:
      raise ValueError(
        "FinetuneConfig: sample_tokens applies to samples, got 0 of them; "
        "leave sample_tokens out, or raise samples"
      )
    if self.samples and self.distributed:
      raise ValueError(
        "FinetuneConfig: samples need a run of one process, got distributed; "
        "pass --samples 0"
      )

  def check_mesh(self):
    model = self.model
    sees_images = isinstance(model, VisionLanguageConfig)
    for name, is_set, needs_images in (
      ("images", self.data.images, True),
      ("trained", self.trained != "decoder", True),
      ("optimizer_in_backward", self.optimizer_in_backward, False),
      ("optim.optimizer coat_muon", self.optim.optimizer == "coat_muon", False),
      ("watch", self.watch, False),
    ):
      if is_set and needs_images != sees_images:
        kinds = ("a text-only model", "a vision-language model")
        raise ValueError(
          f"FinetuneConfig: {name} needs {kinds[needs_images]}, got "
          f"{kinds[sees_images]}; leave {name} out, or start from another "
          "checkpoint"
        )
    if not isinstance(model, VisionLanguageConfig):
      super().check_mesh()
      return
    # Check the decoder like a text-only model, with the same error messages.
    text: dict[str, Any] = dict(model=model.text, trained="decoder")
    data = dataclasses.replace(self.data, images="")
    dataclasses.replace(self, data=data, **text).check_mesh()
    check_tower_fits(self.mesh_sizes, model.vision)

  def _check_steps(self):
    if self.steps:  # Otherwise `epochs` determines them.
      super()._check_steps()
