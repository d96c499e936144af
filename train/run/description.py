# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself, in config.json and in each checkpoint.

It is the configuration and a fingerprint of the data, and decides whether a
checkpoint may be continued.
"""

import dataclasses
import json
from pathlib import Path

from train.config import ModelConfig, OptimConfig, TrainConfig, resume_rule
from train.data.tokens import DataConfig, TokenSource

_FORMAT = "coat_jax run 1"


def describe(config: TrainConfig, tokens: TokenSource) -> dict:
  """Describes a run, for config.json and for checkpoints.

  Args:
    config: The run's.
    tokens: Its data.
  """
  return {
    "format": _FORMAT,
    "config": dataclasses.asdict(config),
    "fingerprint": tokens.fingerprint,
    "change_times": tokens.change_times,
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
  values = description["config"]
  parts = dict(model=ModelConfig, optim=OptimConfig, data=DataConfig)
  parts = {name: part(**values[name]) for name, part in parts.items()}
  return TrainConfig(**{**values, **parts})


def check_same(
  where: Path, saved: dict, config: TrainConfig, tokens: TokenSource
) -> list[str]:
  """Checks that a run can continue a checkpoint.

  Args:
    where: The checkpoint's folder, for messages.
    saved: The description in it.
    config: The run's that is to continue it; with `convert_state` its moments
      may have another codec, and its weights another kind of storage.
    tokens: Its data.

  Returns:
    What has changed and may, as `optim.lr: 0.001 -> 0.0005`.

  Raises:
    ValueError: the checkpoint is of another run, with each difference.
  """
  before = _flatten(_with_new_options(saved["config"], TrainConfig))
  now = _flatten(dataclasses.asdict(config))
  changed = {
    name: f"{name}: {before.get(name)} -> {now.get(name)}"
    for name in {**before, **now}
    if before.get(name) != now.get(name)
  }

  def changes(*rules: str) -> list[str]:
    return [
      text for name, text in changed.items() if resume_rule(name) in rules
    ]

  fixed, converted = changes("fixed"), changes("converted")
  if not tokens.has_fingerprint(saved["fingerprint"]):
    fixed.append("data: other tokens")
  if fixed or (converted and not config.convert_state):
    convert = "" if fixed else "--convert-state to convert its state, "
    raise ValueError(
      f"resume: {where} is of another run, got "
      f"{'; '.join(fixed + converted)}; pass {convert}what it was trained "
      "with, or another --out to start a run"
    )
  allowed = changes("converted", "reported")
  if saved.get("change_times", tokens.change_times) != tokens.change_times:
    allowed.append(
      "data: files were changed or copied since; the fingerprint is the same, "
      "but it does not read all of files this large"
    )
  return allowed


def _with_new_options(values: dict, part: type) -> dict:
  """Stored values of a dataclass; newer options have their defaults."""
  values = dict(values)
  for field in dataclasses.fields(part):
    name = field.name
    if name in values and dataclasses.is_dataclass(field.type):
      values[name] = _with_new_options(values[name], field.type)  # pyright: ignore[reportArgumentType]
    elif name not in values and field.default is not dataclasses.MISSING:
      values[name] = field.default
  return values


def _flatten(tree: dict, prefix: str = "") -> dict:
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= _flatten(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat
