# SPDX-License-Identifier: Apache-2.0
"""What a run reports: its sizes, and how well moments fit their codes."""

import jax
import numpy as np

from coat_jax.optimizer.report import state_bytes, state_report
from train import weights
from train.config import TrainConfig
from train.run import processes
from train.step import TrainState, abstract_state, build_optimizer


def describe_sizes(config: TrainConfig, params) -> str:
  """Writes a line on what the options amount to.

  Args:
    config: The run's.
    params: Its parameters, possibly abstract.
  """
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  tokens = config.batch * config.seq
  state = state_bytes_per_param(config)
  return (
    f"{config.out}: {count / 1e6:,.2f} M parameters, {state:.2f} bytes each in "
    f"the optimizer; {tokens:,} tokens a step, {tokens * config.steps:,} in all"
  )


def report_state(config: TrainConfig, state: TrainState) -> dict:
  """Reports how well the moments fit their codes.

  Args:
    config: The run's, with report_state on.
    state: Its state.

  Returns:
    A line for metrics.jsonl: `state`, from `coat_jax.state_report`, and for
    codec coat `powers`: for each moment, how many groups have which power
    k, in sixteenths. Groups of zeros have none.
  """
  codec = config.optim.moment_codec()
  state = processes.gather_arrays(state._replace(params=()))
  row = {
    "state": state_report(state.optimizer, codec=codec, reference=state.exact)
  }
  if codec.name == "coat":
    row["powers"] = _count_powers(state)
  return row


def _count_powers(state: TrainState) -> dict[str, dict[int, int]]:
  """Counts groups by their k in sixteenths."""
  adam, _ = weights.without_low(state.optimizer)
  counts = {}
  for name in ("mu", "nu"):
    total = np.zeros(256, np.int64)
    trees = [
      getattr(adam, f"{name}_{statistic}") for statistic in ("range", "amax")
    ]
    for power, amax in zip(*map(jax.tree.leaves, trees), strict=True):
      if power.ndim:  # Leaves that stay f32 have a scalar.
        used = np.asarray(power)[np.asarray(amax) > 0]
        total += np.bincount(used.ravel(), minlength=256)
    counts[name] = {int(k): int(total[k]) for k in np.flatnonzero(total)}
  return counts


def state_bytes_per_param(config: TrainConfig) -> float:
  """Computes the optimizer's bytes per parameter, from abstract shapes."""
  state = abstract_state(config, build_optimizer(config))
  return state_bytes(state.optimizer).bytes_per_param
