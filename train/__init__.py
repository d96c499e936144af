# SPDX-License-Identifier: Apache-2.0
"""Training programs to read, to run from the clone, and to copy.

  commands   pretrain, finetune, vit, convert, generate, evaluate, plan, plot:
             one file each; vit with vit_config, finetune with
             finetune_config, conversations and samples, plan with planning
             and search, evaluate with evaluation/
  loop       of a training run, which pretrain and finetune share
  a model    source: of a run, or of a folder of transformers
  a step     presets, config, optim_config, combinations, options, mesh,
             schedule, weights, optimizers, update, step, and objective: what
             is learned of a batch, text or images
  data/      from files to batches
  run/       folder, checkpoints, log, signals, processes, comparison of a run
  command_line  errors of commands in words of their options
  memory     bytes that a layer saves for its backward pass
  watch      what tells early that low precision is about to hurt

A program of your own needs `step` with `objective`, `schedule`, `weights`,
`optimizers` and `update`, `config` with `optim_config`, `combinations` and
`options`, `finetune_config`, which `objective` knows, `mesh`, `presets` and
`data`, and no more than this to train on one device:

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

What can be left out, and what is lost then:
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

  Args:
    line: The words of the command line, from `python` on.
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
