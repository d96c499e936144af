# SPDX-License-Identifier: Apache-2.0
"""Checks options of a run that exclude each other."""

from typing import Any


def check_combinations(config: Any) -> None:
  """Raises ValueError if options of a `TrainConfig` exclude each other."""
  for name in ("grad_reduce", "distributed"):
    if not config.mesh and getattr(config, name) != getattr(type(config), name):
      raise ValueError(
        f"TrainConfig: {name} applies to a run on a mesh, got none; pass "
        "--mesh fsdp=8 with the number of devices, or leave it out"
      )
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
  twin = ("bf16", "bfloat16", "float32", "float32")
  own = (config.recipe, config.compute, config.optim.codec, config.params)
  if config.compare and own == twin and config.remat != "fp8_layer":
    raise ValueError(
      "TrainConfig: compare=bf16 needs a run that differs from its twin, got "
      "recipe bf16 with codec float32 and params float32; change one of them"
    )
  _check_optimizer(config)
  if config.optimizer_in_backward:
    _check_in_backward(config)


def _check_optimizer(config: Any) -> None:
  """Raises ValueError if the run's optimizer does not support an option."""
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
  """Raises ValueError if an option needs all gradients at once."""
  impossible = {
    f"accumulate {config.accumulate}": (
      config.accumulate > 1,
      "each microbatch would be a step of its own; lower batch, or raise "
      "optim.b2 with more and smaller steps",
    ),
    "optim.clip global": (
      config.optim.clip == "global",
      "the global norm is known only after the last gradient; pass "
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
