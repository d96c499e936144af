# SPDX-License-Identifier: Apache-2.0
"""Training programs to read, to run from the clone, and to copy.

  commands       pretrain, finetune, vit, convert, generate, evaluate, plan and
                 plot, one file each; convert_* are parts of convert
  loop           the training loop of pretrain, finetune and vit
  step, update   one training step; objective defines losses
  config         the options of a run, with optim_config, finetune_config,
                 vit_config and presets; options and mesh check it
  source         opens the model of a run, or a Hugging Face checkpoint
  restore        reads a checkpoint of a run that is resumed
  data/          turns files into batches
  run/           folder, checkpoints, log, signals and processes of a run
  memory/        counts and plans the memory of a step
  watch          looks for early signs that low precision is about to hurt

A program of your own needs `step`, `update`, `objective`, `weights`,
`optimizers`, `config`, `optim_config`, `finetune_config`, `options`, `mesh`,
`presets` and `data`. This one trains on one device:

```python
import jax
from train import step
from train.data.batches import train_iterator
from train.data.tokens import load_tokens
from train.presets import demo

config = demo()
tokens = load_tokens(config.data, config.model.vocab_size)
batches = train_iterator(
  tokens, seq_len=config.seq, batch_size=config.batch, seed=config.seed
)
optimizer = step.build_optimizer(config)
state = step.initial_state(config, optimizer)
train_step = step.train_step(config, step.build_graph(config), optimizer)
train_step = jax.jit(train_step, donate_argnums=0)
for _ in range(config.steps):
  state, metrics = train_step(state, next(batches)["tokens"])
```

To save and resume, you also need `run.checkpoint`, `run.checksums` and
`run.processes`. You don't need `presets` if you build a `TrainConfig` yourself,
nor `mesh` if you remove its checks from `config`.
"""

import sys

COMMANDS = (
  *("pretrain", "finetune", "vit", "convert", "generate", "evaluate", "plan"),
  *("plot", "data.digits"),
)


def check_command(line: list[str]) -> None:
  """Ends `python -m train.NAME` with status 2 if NAME is not a command.

  Otherwise Python would print nothing, as if the command had succeeded.
  """
  _, _, rest = " ".join(line).partition(" -m ")
  name = rest.split(" ")[0]
  commands = [f"train.{command}" for command in COMMANDS]
  if name.split(".")[0] == "train" and name not in commands:
    print(
      f"error: {name} is not a command; the commands are "
      f"{', '.join(commands)}, each with --help",
      file=sys.stderr,
    )
    sys.exit(2)


if sys.argv[:1] == ["-m"]:  # Python is still looking for the module.
  check_command(sys.orig_argv)
