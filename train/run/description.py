# SPDX-License-Identifier: Apache-2.0
"""The description of a run, stored in config.json and each checkpoint.

It is the configuration and a fingerprint of the data, and decides whether a
checkpoint may be continued.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol

from train.config import TrainConfig, resume_rule
from train.finetune_config import FinetuneConfig
from train.options import part_of
from train.vit_config import VitConfig

_FORMAT = "coat_jax run 1"
# The configurations of commands, by what a description has as `command`; that
# of train.pretrain has nothing.
_COMMANDS = {None: TrainConfig, "finetune": FinetuneConfig, "vit": VitConfig}


class Fingerprinted(Protocol):
  """The part of `train.run.data.RunData` that a description uses."""

  @property
  def fingerprint(self) -> str: ...

  @property
  def change_times(self) -> str | None: ...


def describe(config: TrainConfig, data: Fingerprinted) -> dict:
  """Describes a run, for config.json and for checkpoints."""
  kinds = {kind: command for command, kind in _COMMANDS.items()}
  command = kinds[type(config)]
  return {
    "format": _FORMAT,
    **({} if command is None else {"command": command}),
    "config": dataclasses.asdict(config),
    "fingerprint": data.fingerprint,
    "change_times": data.change_times,
  }


def is_described(file: Path) -> bool:
  """Whether a file holds the description of a run of this program."""
  try:
    description = json.loads(file.read_bytes())
  except (OSError, ValueError, RecursionError):  # Of 300 kB of brackets, say.
    return False
  return isinstance(description, dict) and description.get("format") == _FORMAT


def configuration(description: dict) -> TrainConfig:
  """Returns the configuration in a description that was read back."""
  return _rebuild(_kind(description), description["config"])


def _rebuild(kind: type, values: dict) -> Any:
  """The inverse of `dataclasses.asdict`."""
  parts = {
    field.name: _rebuild(part, values[field.name])
    for field in dataclasses.fields(kind)
    if field.name in values and (part := part_of(field, values[field.name]))
  }
  return kind(**{**values, **parts})


def _kind(description: dict) -> type[TrainConfig]:
  return _COMMANDS[description.get("command")]


def check_same(
  where: Path, saved: dict, config: TrainConfig, data: Fingerprinted
) -> list[str]:
  """Checks that a run can continue a checkpoint; returns allowed changes."""
  if _kind(saved) is not type(config):
    raise ValueError(
      f"resume: {where} is of train.{saved.get('command', 'pretrain')}; pass "
      "its options to that command, or another --out to start a run"
    )
  before = _flatten(saved["config"])
  now = _flatten(dataclasses.asdict(config))
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
  if saved["fingerprint"] != data.fingerprint:
    fixed.append("data: other tokens")
  if fixed or (converted and not config.convert_state):
    is_adam = config.optim.optimizer == "coat_adamw"  # Others stay as they are.
    convert = "--convert-state to convert its state, "
    convert = convert if is_adam and not fixed else ""
    raise ValueError(
      f"resume: {where} is of another run, got "
      f"{'; '.join(fixed + converted)}; pass {convert}what it was trained "
      "with, or another --out to start a run"
    )
  allowed = changes("converted", "reported")
  if saved["change_times"] != data.change_times:
    allowed.append(
      "data: files were changed or copied since; the fingerprint is the same, "
      "but it does not read all of files this large"
    )
  return allowed


def _flatten(tree: dict, prefix: str = "") -> dict:
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= _flatten(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat
