# SPDX-License-Identifier: Apache-2.0
"""Converts RoPE scalings to the text in `ModelConfig.rope_scaling` and back.

The text consists of a type and its fields, named as in transformers:
`llama3,factor=8,low_freq_factor=1,high_freq_factor=4,...`.
"""

import dataclasses

from coat_jax.numerics.checks import check_kind
from coat_jax.ops.rope import (
  LinearScaling,
  Llama3Scaling,
  RopeScaling,
  YarnScaling,
)

SCALINGS: dict[str, type[RopeScaling]] = {
  "linear": LinearScaling,
  "llama3": Llama3Scaling,
  "yarn": YarnScaling,
}


def parse_scaling(text: str | None) -> RopeScaling | None:
  """Parses a scaling of RoPE's frequencies.

  Args:
    text: `TYPE,FIELD=NUMBER,...`, such as `linear,factor=4`; or None.

  Returns:
    `layers.LinearScaling`, `Llama3Scaling` or `YarnScaling`; None if `text` is
    None.

  Raises:
    TypeError: `text` is not a string.
    ValueError: a type or field is unknown, a field is missing, or a number is
      outside its range.
  """
  if text is None:
    return None
  remedy = "pass one such as 'linear,factor=4'"
  check_kind("rope_scaling", "it", text, str, remedy)
  name, *fields = text.split(",")
  if name not in SCALINGS:
    raise ValueError(
      f"rope_scaling: the type must be one of {tuple(SCALINGS)}, got "
      f"{name[:40]!r}; write it like linear,factor=4"
    )
  values = {}
  for field in fields:
    key, _, number = field.partition("=")
    try:
      values[key] = float(number)
    except ValueError as error:
      raise ValueError(
        f"rope_scaling: {name} needs fields like factor=4, got {field[:40]!r}; "
        "copy the fields from the model's config.json"
      ) from error
  return scaling_of(name, values)


def scaling_of(name: str, values: dict[str, float]) -> RopeScaling:
  """Builds a scaling of a known type; raises ValueError if fields are wrong."""
  kind = SCALINGS[name]
  known = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
  needed = {
    key for key, field in known.items() if field.default is dataclasses.MISSING
  }
  if values.keys() - known.keys() or needed - values.keys():
    optional = ", ".join(sorted(known.keys() - needed)) or "none"
    raise ValueError(
      f"rope_scaling: {name} must have the fields {', '.join(sorted(needed))} "
      f"(optional: {optional}), got {', '.join(values) or 'none'}; copy the "
      "fields from the model's config.json"
    )
  length = "original_max_position_embeddings"
  if length in values:
    if not values[length].is_integer():
      raise ValueError(
        f"rope_scaling: {length} must be a whole number, got {values[length]}; "
        "copy it from the model's config.json"
      )
    values = values | {length: int(values[length])}
  return kind(**values)


def write_scaling(scaling: RopeScaling | None) -> str | None:
  """Converts a scaling to text, which omits fields with default values."""
  if scaling is None:
    return None
  name, fields = scaling_fields(scaling)
  return ",".join([name, *(f"{key}={x!r}" for key, x in fields.items())])


def scaling_fields(scaling: RopeScaling) -> tuple[str, dict[str, float]]:
  """Returns a scaling's type, and the fields that differ from the defaults."""
  (name,) = (name for name, kind in SCALINGS.items() if type(scaling) is kind)
  return name, {
    field.name: getattr(scaling, field.name)
    for field in dataclasses.fields(scaling)  # pyright: ignore[reportArgumentType]
    if getattr(scaling, field.name) != field.default
  }
