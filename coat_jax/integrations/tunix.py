# SPDX-License-Identifier: Apache-2.0
"""Adds coat_jax's optimizers to the command line of Tunix.

Tunix's trainers accept any optimizer and do not need this module. Tunix's
commands look up `opt_type` in optax, so start them through this module:

  python -m coat_jax.integrations.tunix tunix.cli.peft_main config.yaml \
    optimizer_config.opt_type=coat_adamw optimizer_config.learning_rate=1e-4
"""

import runpy
import sys

import optax

from coat_jax import coat_adamw, coat_lion, coat_muon


def register() -> None:
  """Adds our optimizers to optax, where Tunix looks up `opt_type`."""
  for optimizer in (coat_adamw, coat_lion, coat_muon):
    setattr(optax, optimizer.__name__, optimizer)


if __name__ == "__main__":
  if len(sys.argv) < 2:
    sys.exit(
      "usage: python -m coat_jax.integrations.tunix "
      "{tunix.cli.peft_main,tunix.cli.grpo_main} CONFIG [KEY=VALUE ...]"
    )
  register()
  sys.argv = sys.argv[1:]
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
