# SPDX-License-Identifier: Apache-2.0
"""Training programs to read, to run from the clone, and to copy.

  commands   pretrain, convert, generate, plan, plot: one file each; plan with
             planning and search
  a step     presets, config, optim_config, options, mesh, schedule, weights,
             update, step
  data/      from files to batches
  run/       folder, checkpoints, log, signals, processes, comparison of a run
  memory     bytes that a layer saves for its backward pass

A program of your own needs `step` with `schedule`, `weights` and `update`,
`config` with `optim_config` and `options`, `mesh`, `presets` and `data`, and no
more than this to train on one device:

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
  * all of `run`, `pretrain`, `convert`, `generate` and `plot`: files, resuming,
    several processes, comparison with a twin; begin with `run.checkpoint` and
    its `run.checksums` and `run.processes` to save and resume;
  * `plan`, `planning`, `search`, `memory`: knowing before whether a run fits;
  * `presets`: build a `TrainConfig` instead;
  * `mesh`: only after its checks are taken out of `config`.
"""
