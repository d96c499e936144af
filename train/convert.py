# SPDX-License-Identifier: Apache-2.0
"""Converts runs to and from checkpoints of optax's AdamW and Hugging Face.

  python -m train.convert export RUN OUT
  python -m train.convert import DIR PRESET --out RUN [options]
  python -m train.convert export-hf RUN --out DIR
  python -m train.convert import-hf DIR --out RUN [options]

`export` writes the newest checkpoint of a run as an Orbax checkpoint of
{"params": ..., "opt_state": ...}, where opt_state is the state of
`optax.adamw(schedule, mask=mask)`; weights and moments are in f32.

`import` turns such a checkpoint into a run, which `python -m train.pretrain
PRESET --out RUN [options] --resume` continues. Its step is Adam's count, and
that many batches are skipped.

`export-hf` writes the weights of the newest checkpoint as a Hugging Face
folder: config.json, safetensors, and the tokenizer's files if the run began
with such a folder. `import-hf` turns such a folder into a run without steps,
with the settings of the preset finetune and the options, which `python -m
train.pretrain finetune --out RUN [options] --resume` trains. (--init-from of
train.pretrain does both at once, on a mesh.)

All of them work on one device: with JAX_PLATFORMS=cpu a model needs only the
host's memory, 12 bytes a parameter and the codec's. Runs can then be resumed on
any mesh. A command that fails or is stopped removes what it had written; only
one that is killed leaves OUT.unfinished or a run without a step.

Exit status: 0; 1 when a checkpoint could not be written or there was too little
memory; 2 when the input was wrong; 130 and 143 after SIGINT and SIGTERM.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import grain
import jax
from jax import P
from jax.sharding import NamedSharding
from tyro.conf import Positional, arg, subcommand

from coat_jax.optimizer import from_adam_state, sharding, to_adam_state
from train import convert_hf, weights
from train import step as steps
from train.command_line import one_of, read_options
from train.config import TrainConfig
from train.convert_adamw import export_adamw, import_adamw
from train.objective import trained
from train.options import read_path, shown
from train.presets import PRESETS, finetune
from train.run.checkpoint import Checkpoints, read_description
from train.run.description import configuration
from train.run.exits import exit_status, stop_on_signal
from train.step import TrainState

_Presets = one_of(PRESETS)
# The options that decide how stored bytes are read; rounding does not.
_LAYOUT = ("codec", "group_size", "second")


def restore(
  checkpoints: Checkpoints,
  step: int,
  config: TrainConfig,
  abstract: TrainState,
  batches: grain.DatasetIterator,
) -> TrainState:
  """Restores a checkpoint, and converts its state to the run's options."""
  saved = configuration(read_description(checkpoints.path, step))
  params = abstract.params
  if saved.params != config.params:
    params = weights.abstract(saved.params, params)
  same_codes = all(
    getattr(saved.optim, name) == getattr(config.optim, name)
    for name in _LAYOUT
  )
  optimizer = abstract.optimizer
  if not same_codes or saved.params != config.params:
    # Moments name their codec; if they have the same codes, that is the run's.
    optim = config.optim if same_codes else saved.optim
    optimizer = _abstract_optimizer(
      dataclasses.replace(saved, optim=optim), params
    )
  # Rule global keeps no norms; the other rules keep the same ones.
  clip = () if saved.optim.clip == "global" else abstract.clip
  state = checkpoints.restore(
    step,
    abstract._replace(params=params, optimizer=optimizer, clip=clip),
    batches,
  )
  if saved.optim.clip == "global":
    state = state._replace(clip=steps.initial_clip(config, abstract))
  if saved.params != config.params:
    state = _stored_anew(state, config, abstract)
  if not same_codes:
    codec, seed = config.optim.moment_codec(), config.seed
    recode = jax.jit(
      lambda x: from_adam_state(to_adam_state(x), codec=codec, seed=seed),
      out_shardings=steps.shardings(abstract.optimizer),
    )
    state = state._replace(optimizer=recode(state.optimizer))
  return state


def _stored_anew(
  state: TrainState, config: TrainConfig, abstract: TrainState
) -> TrainState:
  """Stores the weights of a state as `config` says; moments keep their bits."""
  adam, low = weights.without_low(state.optimizer)
  where = abstract.params, weights.without_low(abstract.optimizer)[1]

  @functools.partial(jax.jit, out_shardings=steps.shardings(where))
  def convert(params, low):
    params, low = weights.store(config.params, weights.load(params, low))
    return params, low and trained(config, low)

  params, low = convert(state.params, low)
  return state._replace(params=params, optimizer=weights.with_low(adam, low))


def _abstract_optimizer(config: TrainConfig, params: Any):
  """Builds an abstract state of the optimizer, sharded as its parameters are.

  If a device would hold a part of a group, columns are replicated: the codec of
  the checkpoint may come from a mesh that other groups fitted.
  """
  init, params = steps.build_optimizer(config).init, trained(config, params)
  if jax.tree.leaves(params)[0].sharding is None:
    return jax.eval_shape(init, params)
  codec = config.optim.moment_codec()
  size = getattr(codec.mu, "group_size", 1)  # Plain moments have no groups.

  def with_whole_groups(p):
    mesh, spec = p.sharding.mesh, p.sharding.spec
    if p.sharding.shard_shape(p.shape)[-1] % size == 0:
      return p
    rows = (*spec, *(None,) * p.ndim)[: p.ndim - 1]
    return p.update(sharding=NamedSharding(mesh, P(*rows)))

  params = jax.tree.map(with_whole_groups, params)
  return sharding.abstract_state(init, params)


@dataclasses.dataclass(frozen=True)
class Export:
  """Writes a run's newest checkpoint as a checkpoint of optax's AdamW.

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
    shown("default: that of the checkpoint it began with, or of its weights"),
  ] = None

  def convert(self, out: Path) -> str:
    step = convert_hf.export_hf(self.run, out, self.dtype)
    return f"weights of step {step}, for transformers"


@dataclasses.dataclass(frozen=True)
class Import:
  """Turns a checkpoint of optax's AdamW into a run.

  Attributes:
    source: Folder of the checkpoint.
    config: The run to make, as for train.pretrain.
  """

  make: ClassVar = import_adamw

  source: Annotated[Positional[Path], arg(metavar="DIR")]
  config: Annotated[_Presets, arg(name="")]

  @property
  def out(self) -> str:
    return self.config.out

  def convert(self, _: Path) -> str:
    step = type(self).make(read_path("source", self.source), self.config)
    return f"--resume continues from step {step}"


@dataclasses.dataclass(frozen=True)
class ImportHF(Import):
  """Turns a Hugging Face folder into a run without steps.

  Attributes:
    source: The folder.
    config: The run to make. Its model's shape comes from the folder.
  """

  make: ClassVar = convert_hf.import_hf

  config: Annotated[TrainConfig, arg(name="")] = finetune()


def _run(command: Export | ExportHF | Import | ImportHF) -> None:
  """Runs a command and prints what was made."""
  out = read_path("out", command.out)
  with stop_on_signal(out):
    text = command.convert(out)
  print(f"{out}: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, converts, and returns the exit status."""
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
    smaller="set JAX_PLATFORMS=cpu, for which the host's memory is enough",
  )


if __name__ == "__main__":
  sys.exit(main())
