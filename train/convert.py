# SPDX-License-Identifier: Apache-2.0
"""Converts runs to and from optax.adamw and Hugging Face checkpoints.

  python -m train.convert export RUN OUT
  python -m train.convert import DIR PRESET --out RUN [options]
  python -m train.convert export-hf RUN --out DIR
  python -m train.convert import-hf DIR --out RUN [options]

`export` writes the newest checkpoint of a run as an Orbax checkpoint of
{"params": ..., "opt_state": ...}, where opt_state is the state of
`optax.adamw(schedule, mask=mask)`. Weights and moments are in f32.

`import` turns such a checkpoint into a run, and `python -m train.pretrain
PRESET --out RUN [options] --resume` continues this run. Adam's step count
becomes the run's step, and the resumed run skips that many batches.

`export-hf` writes the weights of the newest checkpoint as a Hugging Face
folder: config.json, safetensors, and the tokenizer's files if the run started
from a Hugging Face folder. `import-hf` turns a Hugging Face folder into a run
at step 0. The options change the settings of the `finetune` preset. `python -m
train.pretrain finetune --out RUN [options] --resume` trains this run.

All four commands run on one device. With JAX_PLATFORMS=cpu they need only host
memory: `export` and `import` need 12 bytes per parameter plus the encoded
moments; the other commands need less. A command that fails or is stopped
removes what it wrote.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg, subcommand

from train import convert_hf
from train.command_line import one_of, read_options
from train.config import TrainConfig
from train.convert_adamw import export_adamw, import_adamw
from train.options import read_path, shown
from train.presets import PRESETS, finetune
from train.run.exits import exit_status, stop_on_signal

_Presets: Any = one_of(PRESETS)


@dataclasses.dataclass(frozen=True)
class Export:
  """Exports a run's newest checkpoint for optax's AdamW.

  Attributes:
    run: Folder of the run.
    out: Folder to create.
  """

  run: Annotated[Positional[Path], arg(metavar="RUN")]
  out: Annotated[Positional[Path], arg(metavar="OUT")]

  def convert(self, out: Path) -> str:
    step = export_adamw(self.run, out)
    return f"params and opt_state of step {step}"


@dataclasses.dataclass(frozen=True)
class ExportHF:
  """Exports a run's newest checkpoint as a Hugging Face folder.

  Attributes:
    run: Folder of the run.
    out: Folder to create.
    dtype: The dtype of the tensors.
  """

  run: Annotated[Positional[Path], arg(metavar="RUN")]
  out: Annotated[Path, arg(metavar="DIR")]
  dtype: Annotated[
    convert_hf.Dtype | None,
    shown("default: the --init-from checkpoint's, or else the run's"),
  ] = None

  def convert(self, out: Path) -> str:
    step = convert_hf.export_hf(self.run, out, self.dtype)
    return f"weights of step {step}, for transformers"


@dataclasses.dataclass(frozen=True)
class Import:
  """Turns a checkpoint of optax's AdamW into a run.

  Attributes:
    source: Folder of the checkpoint.
    config: The options of the new run, as in train.pretrain.
  """

  name: ClassVar[str] = "import"
  make: ClassVar[Callable[[Path, TrainConfig], int]] = import_adamw

  source: Annotated[Positional[Path], arg(metavar="DIR")]
  config: Annotated[_Presets, arg(name="")]  # pyright: ignore

  @property
  def out(self) -> str:
    return self.config.out

  def convert(self, _: Path) -> str:
    source = read_path("source", self.source)
    if self.config.init_from:
      raise ValueError(
        f"{self.name}: weights come from {source}, got --init-from too; leave "
        "--init-from out"
      )
    step = type(self).make(source, self.config)
    return f"--resume continues from step {step}"


@dataclasses.dataclass(frozen=True)
class ImportHF(Import):
  """Turns a Hugging Face folder into a run at step 0.

  Attributes:
    source: The Hugging Face folder.
    config: The options of the new run. The model's shape comes from the folder.
  """

  name: ClassVar[str] = "import-hf"
  make: ClassVar[Callable[[Path, TrainConfig], int]] = convert_hf.import_hf

  config: Annotated[TrainConfig, arg(name="")] = finetune()


def _run(command: Export | ExportHF | Import | ImportHF) -> None:
  out = read_path("out", command.out)
  with stop_on_signal(out):
    text = command.convert(out)
  print(f"{out}: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
  command = read_options(
    Annotated[Export, subcommand("export")]
    | Annotated[Import, subcommand("import")]
    | Annotated[ExportHF, subcommand("export-hf")]
    | Annotated[ImportHF, subcommand("import-hf")],
    "convert",
    arguments,
  )
  return exit_status(
    lambda: _run(command),
    smaller="set JAX_PLATFORMS=cpu to use the host's memory",
  )


if __name__ == "__main__":
  sys.exit(main())
