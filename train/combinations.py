# SPDX-License-Identifier: Apache-2.0
"""Checks options of a run that exclude each other."""

from typing import Any


def check_combinations(config: Any) -> None:
  """Raises ValueError where options of a `TrainConfig` exclude each other."""
  if config.grad_accumulate != "float32" and (
    config.accumulate == 1 or config.params == "float32"
  ):
    raise ValueError(
      "TrainConfig: grad_accumulate applies to microbatches of a run with "
      f"weights in bfloat16, got accumulate {config.accumulate} and params "
      f"{config.params}; leave it out, or change these"
    )
  if config.resume and config.overwrite:
    raise ValueError(
      "TrainConfig: resume and overwrite exclude each other; pass resume to "
      "continue the run, overwrite to start it afresh"
    )
  if config.convert_state and not config.resume:
    raise ValueError(
      "TrainConfig: convert_state is for a run that is resumed, got resume "
      "False; pass resume too, or leave convert_state out"
    )
  _check_optimizer(config)
  if config.optimizer_in_backward:
    _check_in_backward(config)


def _check_optimizer(config: Any) -> None:
  """Raises where an option is for other optimizers' moments or steps."""
  adamw, both = ("coat_adamw",), ("coat_adamw", "coat_lion")
  needs = {
    "optimizer_in_backward": (config.optimizer_in_backward, both),
    "params bfloat16_low8": (config.params == "bfloat16_low8", both),
    "report_state": (config.report_state, adamw),
    "convert_state": (config.convert_state, adamw),
  }
  for option, (is_set, optimizers) in needs.items():
    if is_set and config.optim.optimizer not in optimizers:
      raise ValueError(
        f"TrainConfig: {option} needs optim.optimizer "
        f"{' or '.join(optimizers)}, got {config.optim.optimizer}; leave one "
        "of them out"
      )


def _check_in_backward(config: Any) -> None:
  """Raises where an option needs the gradients of all layers at once."""
  impossible = {
    f"accumulate {config.accumulate}": (
      config.accumulate > 1,
      "each microbatch would be a step of its own; lower batch, or raise "
      "optim.b2 with more and smaller steps",
    ),
    "optim.clip global": (
      config.optim.clip == "global",
      "the global norm is known when the last gradient is; pass "
      "--optim.clip share",
    ),
    "report_state": (
      config.report_state,
      "its exact moments need all gradients; pass --no-report-state",
    ),
  }
  for option, (is_set, reason) in impossible.items():
    if is_set:
      raise ValueError(
        "TrainConfig: optimizer_in_backward uses each gradient as soon as it "
        f"exists, got {option}: {reason}"
      )
