# SPDX-License-Identifier: Apache-2.0
"""Formats rows of `studies.quantization` as the tables of docs/stability.md."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from studies.quantization_error import FORMATS, RECIPES
from studies.trained_moments import GROUP_SIZE

Rows = Sequence[dict]


def select(rows: Rows, bench: str, **case: Any) -> list[dict]:
  """Selects the rows of `bench` whose case contains these values."""
  return [
    row
    for row in rows
    if row["bench"] == f"quantization.{bench}"
    and all(row["case"].get(name) == value for name, value in case.items())
  ]


def one(rows: Rows, bench: str, **case: Any) -> dict:
  """Returns the row that `select` finds; raises unless there is exactly one."""
  found = select(rows, bench, **case)
  if len(found) != 1:
    raise ValueError(
      f"quantization: expected exactly one row of {bench} with {case}, got "
      f"{len(found)}; repeat python -m studies.quantization run"
    )
  return found[0]


def tables(rows: Rows) -> dict[str, str]:
  """Formats the tables of docs/stability.md in Markdown, by title."""
  return {
    "Moments in pairs of formats": _pairs(rows),
    "Codecs": _codecs(rows),
    "Activations, gradients and weights": _tensors(rows),
    "A layer in each recipe": _layers(rows),
    "INT8 compared with FP8 at the same size": _integers(rows),
  }


def _pairs(rows: Rows) -> str:
  of_group = select(rows, "moments", group_size=GROUP_SIZE)
  names = list(dict.fromkeys(row["case"]["first"] for row in of_group))
  lines = []
  for first in names:
    found = [one(of_group, "moments", first=first, second=x) for x in names]
    lines.append([first, *(digits(x["update_error"]) for x in found)])
  found = [one(of_group, "moments", first=x, second=x) for x in names]
  lines.append(
    ["share of v that became 0", *(_share(x["zeroed_nu"]) for x in found)]
  )
  kept = [digits(x["kept_error"]) for x in found]
  lines.append(
    ["m and v in the column's format, without values whose v became 0", *kept]
  )
  return _markdown(["first \\ second", *names], lines)


def _codecs(rows: Rows) -> str:
  header = ["codec", "rounding", "bytes/parameter", "m", "v", "m / (√v + ε)"]
  header += ["next update", "largest update", "share of v that became 0"]
  lines = []
  for row in select(rows, "codecs"):
    case, second = row["case"], row["case"].get("second")
    name = f"{case['codec']}, v in E5M2" if second == "e5m2" else case["codec"]
    values = [f"{row['bytes_per_param']:.2f}"]
    values += [digits(row[x]) for x in ("mu_error", "nu_error")]
    values += [
      digits(row[x]) for x in ("update_error", "update_rms_error", "max_update")
    ]
    rounding = "" if case["rounding"] == "none" else case["rounding"]
    lines.append([name, rounding, *values, _share(row["zeroed_nu"])])
  return _markdown(header, lines)


def _tensors(rows: Rows) -> str:
  header = ["tensor", "amax / RMS", "kurtosis"]
  columns = [(x, y) for x in FORMATS for y in ("tensor", 128, 16)]
  header += [f"{x}, {y}" for x, y in columns]
  lines = []
  for row in select(rows, "spread"):
    name = row["case"]["tensor"]
    line = [name, f"{row['amax_over_rms']:.0f}", f"{row['kurtosis']:.0f}"]
    for number, shared in columns:
      how = dict(tensor=name, format=number, shared=shared)
      line.append(digits(one(rows, "tensors", **how)["error"]))
    lines.append(line)
  return _markdown(header, lines)


_OF_LAYER = {
  "output": "output",
  "input_gradient": "gradient of the input",
  "weight_gradient": "weight gradients",
  "worst_weight_gradient": "worst weight gradient",
}


def _layers(rows: Rows) -> str:
  lines = []
  for name in RECIPES:
    row = one(rows, "layer", recipe=name)
    lines.append([f"`{name}`", *(digits(row[x]) for x in _OF_LAYER)])
  return _markdown(["recipe", *_OF_LAYER.values()], lines)


def _integers(rows: Rows) -> str:
  """Formats the table that compares the errors of FP8 and INT8."""
  lines = []
  for name, text in _OF_LAYER.items():
    fp8, int8 = (one(rows, "layer", recipe=x)[name] for x in ("coat", "int8"))
    lines.append([f"a layer: {text}", "", *_compared(fp8, int8)])
  kinds = [
    ("activations, one scale per tensor", "activation", "tensor", "E4M3", "1"),
    ("weights, one scale per tensor", "weight", "tensor", "E4M3", "1"),
    ("gradients, one scale per tensor", "gradient", "tensor", "E5M2", "1"),
    ("activations, groups of 16", "activation", 16, "E4M3", "1.13"),
    ("activations, groups of 128", "activation", 128, "E4M3", "1.02"),
  ]
  for text, kind, shared, number, size in kinds:
    found = {
      x: _mean(
        row["error"]
        for row in select(rows, "tensors", kind=kind, shared=shared, format=x)
      )
      for x in (number, "INT8")
    }
    label = f"{text}, {number}"
    lines.append([label, size, *_compared(found[number], found["INT8"])])
  names = {"mu_error": "first moments", "nu_error": "second moments"}
  names |= {"update_error": "m / (√v + ε)"}
  fp8, expanded, int8 = (
    one(rows, "moments", first=x, second=x, group_size=GROUP_SIZE)
    for x in ("E4M3", "E4M3 + expansion", "INT8")
  )
  for row, text, size in (
    (fp8, "E4M3", "1.03"),
    (expanded, "E4M3 + expansion", "1.04 (INT8: 1.03)"),
  ):
    for name, values in names.items():
      label = f"{values}, {text}"
      lines.append([label, size, *_compared(row[name], int8[name])])
  header = ["relative RMS error", "bytes/value", "FP8", "INT8", "INT8 / FP8"]
  return _markdown(header, lines)


def _compared(fp8: float, int8: float) -> list[str]:
  return [digits(fp8), digits(int8), digits(int8 / fp8)]


def _mean(values: Iterable[float]) -> float:
  """Computes the root mean square."""
  return float(np.sqrt(np.mean(np.square(list(values)))))


def digits(x: float) -> str:
  """Formats a number with two or three digits."""
  if x >= 100:
    return f"{x:,.0f}"
  return f"{x:.3g}" if x >= 1 else f"{float(f'{x:.2g}'):g}"


def _share(x: float) -> str:
  return "0" if x == 0 else f"{100 * x:.2g} %"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
  rows = [header, ["---"] * len(header), *lines]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)
