# SPDX-License-Identifier: Apache-2.0
"""Reports a run's size, its held-out metrics, and the error of its moments."""

from typing import Any

import jax
import numpy as np

from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.optimizer.masks import is_encoded
from coat_jax.optimizer.report import state_bytes, state_report
from train import weights
from train.config import TrainConfig
from train.memory.step import device_bytes
from train.objective import trained
from train.run import processes
from train.step import (
  Evaluation,
  TrainState,
  abstract_state,
  build_optimizer,
)


def describe_sizes(config: TrainConfig, params) -> str:
  """Describes the size of a run in one line."""
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  tokens = config.batch * config.seq
  state = state_bytes_per_param(config)
  own = sum(leaf.size for leaf in jax.tree.leaves(trained(config, params)))
  some = "" if own == count else f", of which {own / 1e6:,.2f} M are trained"
  return (
    f"{config.out}: {count / 1e6:,.2f} M parameters{some}, {state:.2f} bytes "
    f"per trained parameter in the optimizer; {tokens:,} tokens per step, "
    f"{tokens * config.steps:,} in total"
  )


def held_out_means(found: list[Evaluation]) -> dict[str, float]:
  """Averages metrics over held-out batches, weighted by numbers of targets."""
  counts = [1 if x.targets is None else int(x.targets) for x in found]

  def mean(values: list) -> float:
    total = np.sum(np.multiply([float(x) for x in values], counts))
    return float(total / max(sum(counts), 1))

  means = {"held_out_loss": mean([x.loss for x in found])}
  if found and found[0].accuracy is not None:
    # An accuracy is a sum of f32 fractions, so rounding can push it above 1.
    means["held_out_accuracy"] = min(mean([x.accuracy for x in found]), 1.0)
  return means


def step_bytes(compiled: jax.stages.Compiled, exact: Any) -> int | None:
  """Counts the bytes that a compiled step needs on each device.

  The f32 moments in `exact` are not counted, because only `--report-state`
  needs them. Returns None if the compiler does not report sizes.
  """
  # On CPUs, `peak_memory_in_bytes` does not include temporaries, so add sizes.
  memory = compiled.memory_analysis()
  if memory is None:
    return None
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
  return total - device_bytes(exact)


def report_state(config: TrainConfig, state: TrainState) -> dict:
  """Measures the errors of the stored moments.

  With codec coat, also counts the powers of dynamic range expansion.
  """
  codec = config.optim.moment_codec()
  state = processes.gather_arrays(state._replace(params=()))
  row: dict = {"state": state_report(state.optimizer, reference=state.exact)}
  if codec.name == "coat":
    row["powers"] = _count_powers(state)
  return row


def _count_powers(state: TrainState) -> dict[str, dict[int, int]]:
  """Counts nonzero groups by their expansion power k; the keys are 16 * k."""
  adam, _ = weights.without_low(state.optimizer)
  counts = {}
  for name in ("mu", "nu"):
    total = np.zeros(256, np.int64)
    moment = getattr(adam, name)
    for encoded in moment.leaves():
      if isinstance(moment.codec, ExpandedFP8) and is_encoded(encoded):
        used = np.asarray(encoded.range)[np.asarray(encoded.amax) > 0]
        total += np.bincount(used.ravel(), minlength=256)
    counts[name] = {int(k): int(total[k]) for k in np.flatnonzero(total)}
  return counts


def state_bytes_per_param(config: TrainConfig) -> float:
  """Computes the optimizer's bytes per trained parameter, from shapes."""
  state = abstract_state(config, build_optimizer(config))
  return state_bytes(state.optimizer).bytes_per_param
