# SPDX-License-Identifier: Apache-2.0
"""Describes a run in config.json and in each checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol

from flax.traverse_util import flatten_dict

from train.config import TrainConfig, resume_rule
from train.finetune_config import FinetuneConfig
from train.options import part_of
from train.vit_config import VitConfig

_FORMAT = "coat_jax run 1"
_COMMANDS = {
  "pretrain": TrainConfig,
  "finetune": FinetuneConfig,
  "vit": VitConfig,
}


class Data(Protocol):
  """The part of a run's data that `describe` reads; see `run.data.RunData`."""

  @property
  def fingerprint(self) -> str: ...
  @property
  def change_times(self) -> str | None: ...


def describe(config: TrainConfig, data: Data) -> dict:
  commands = {kind: command for command, kind in _COMMANDS.items()}
  return {
    "format": _FORMAT,
    "command": commands[type(config)],
    "config": dataclasses.asdict(config),
    "fingerprint": data.fingerprint,
    "change_times": data.change_times,
  }


def is_described(file: Path) -> bool:
  """Returns whether a file describes a run of this program."""
  try:
    description = json.loads(file.read_bytes())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(description, dict) and description.get("format") == _FORMAT


def configuration(description: dict) -> TrainConfig:
  """Rebuilds the configuration from a description."""
  return _rebuild(_COMMANDS[description["command"]], description["config"])


def _rebuild(kind: type, values: dict) -> Any:
  """Inverts `dataclasses.asdict`."""
  parts = {
    field.name: _rebuild(part, values[field.name])
    for field in dataclasses.fields(kind)
    if field.name in values and (part := part_of(field, values[field.name]))
  }
  return kind(**{**values, **parts})


def check_same(
  where: Path, saved: dict, config: TrainConfig, data: Data
) -> list[str]:
  """Checks that a run can continue a checkpoint; returns changes to report."""
  if _COMMANDS[saved["command"]] is not type(config):
    raise ValueError(
      f"resume: {where} was written by train.{saved['command']}; continue the "
      "run with that command, or pass another folder as --out to start a run"
    )
  before = flatten_dict(saved["config"], sep=".")
  now = flatten_dict(dataclasses.asdict(config), sep=".")
  changed = {
    name: f"{name}: {before.get(name)} -> {now.get(name)}"
    for name in {**before, **now}
    if before.get(name) != now.get(name)
  }

  def changes(*rules: str) -> list[str]:
    return [
      text
      for name, text in changed.items()
      if resume_rule(name, type(config)) in rules
    ]

  fixed, converted = changes("fixed"), changes("converted")
  # A changed option such as seq may also change the fingerprint. In that case,
  # report only the option.
  if saved["fingerprint"] != data.fingerprint and not fixed:
    fixed.append("data: the fingerprint differs")
  if fixed or (converted and not config.convert_state):
    convert = ""
    if config.optim.optimizer == "coat_adamw" and not fixed:
      convert = "--convert-state to convert its state, or pass "
    raise ValueError(
      f"resume: {where} was trained with other options (saved -> given): "
      f"{'; '.join(fixed + converted)}; pass {convert}the options with which "
      "it was trained, or another folder as --out to start a run"
    )
  allowed = changes("converted", "reported")
  if saved["change_times"] != data.change_times:
    allowed.append(
      "data: files were changed or copied after the checkpoint was saved; the "
      "fingerprint is the same, but does not cover all of their contents"
    )
  return allowed
