# SPDX-License-Identifier: Apache-2.0
"""Training programs to read, to run from a clone of the repository, or to copy.

  commands       pretrain, finetune, vit, convert, generate, evaluate, plan and
                 plot, one file each; conversations.py is part of finetune, and
                 convert_adamw.py and convert_hf.py are parts of convert
  loop           the training loop of pretrain, finetune and vit
  step, update   one training step; objective.py computes its loss,
                 optimizers.py its learning rate; weights.py converts weights
  config         the options of a run; optim_config, finetune_config and
                 vit_config define more options
  presets        published model shapes and settings
  options, mesh  helpers and checks for options; command_line reads them
  source         opens the model of a run or of a Hugging Face folder
  pretrained     starts a run from the weights of a checkpoint
  restore        restores the checkpoint of a resumed run
  data/          turns files into batches
  run/           the folder, checkpoints, log, signals and processes of a run
  memory/        computes how much memory a step needs
  evaluation/    scores texts, answers and tasks for evaluate
  watch          checks for early signs that low precision will harm training

Your own training program needs `step`, `update`, `objective`, `weights`,
`optimizers`, `config`, `optim_config`, `finetune_config`, `options`, `mesh`,
`presets` and `data`. This example trains on one device:

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

To save and resume, you also need `run.checkpoint`, `run.checksums`,
`run.processes` and `run.writing`.
"""

import sys

COMMANDS = (
  *("pretrain", "finetune", "vit", "convert", "generate", "evaluate", "plan"),
  *("plot", "data.digits"),
)


def check_command(line: list[str]) -> None:
  """Exits with status 2 if `python -m train.NAME` does not name a command."""
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


if sys.argv[:1] == ["-m"]:  # `-m` is still looking for the module.
  check_command(sys.orig_argv)
