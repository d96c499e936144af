# SPDX-License-Identifier: Apache-2.0
"""Training programs to read, to run from the clone, and to copy.

  commands       pretrain, finetune, vit, convert, generate, evaluate, plan and
                 plot, one file each; others by these names belong to them
                 (vit_config, finetune_config, conversations, convert_adamw,
                 convert_hf, planning, search, evaluation/)
  loop           the training loop of pretrain, finetune and vit
  source         opens the model of a run, or a Hugging Face checkpoint
  step, update   one training step; with presets, config, optim_config,
                 combinations, options, mesh, weights, optimizers, and
                 objective, the losses of text and of images
  data/          from files to batches
  run/           folder, checkpoints, log, signals and processes of a run
  command_line   errors of commands in terms of their options
  memory         bytes that a layer saves for its backward pass
  watch          early signs that low precision is about to hurt

A program of your own needs `step`, `update`, `objective`, `weights`,
`optimizers`, `config`, `optim_config`, `finetune_config`, `combinations`,
`options`, `mesh`, `presets` and `data`. This trains on one device:

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

What can be left out, and what is lost:
  * all of `run`, `loop`, `pretrain`, `finetune`, `convert`, `generate`,
    `evaluate`, `evaluation`, `source` and `plot`: files, resuming, several
    processes, comparison with a twin; begin with `run.checkpoint` and its
    `run.checksums` and `run.processes` to save and resume;
  * `plan`, `planning`, `search`, `memory`: knowing before whether a run fits;
  * `command_line`: a box of tyro in place of a sentence;
  * `watch`: the option of that name;
  * `presets`: build a `TrainConfig` instead;
  * `mesh`: only after its checks are taken out of `config`.
"""

import sys

COMMANDS = (
  *("pretrain", "finetune", "vit", "convert", "generate", "evaluate", "plan"),
  *("plot", "data.digits"),
)


def check_command(line: list[str]) -> None:
  """Ends `python -m` of a module here that is no command, with status 2.

  It would define its functions, print nothing and seem to have worked.
  """
  _, _, rest = " ".join(line).partition(" -m ")
  name = rest.split(" ")[0]
  commands = [f"train.{command}" for command in COMMANDS]
  if name.split(".")[0] == "train" and name not in commands:
    print(
      f"error: {name} is no command, got python -m {name}; pass one of "
      f"{', '.join(commands)}, each with --help",
      file=sys.stderr,
    )
    sys.exit(2)


if sys.argv[:1] == ["-m"]:  # While Python looks for the module to run.
  check_command(sys.orig_argv)
