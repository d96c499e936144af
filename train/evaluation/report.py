# SPDX-License-Identifier: Apache-2.0
"""Formats evaluation results as tables, and writes them as JSON."""

import contextlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import coat_jax
from coat_jax.models.hf.whole import written_whole
from train.evaluation.answers import Answers
from train.evaluation.perplexity import Documents, Perplexity
from train.run.metrics import format_number, format_table
from train.run.writing import save_errors

_PACKAGES = ("jax", "tokenizers", "lm_eval", "datasets")


def text_row(
  data: str, kind: Documents, found: Perplexity, seconds: float
) -> dict[str, Any]:
  return {
    "data": data,
    "documents_are": kind,
    **found._asdict(),
    "nats_per_token": found.nats_per_token,
    "perplexity": found.perplexity,
    "bits_per_byte": found.bits_per_byte,
    "word_perplexity": found.word_perplexity,
    "seconds": seconds,
  }


def text_table(rows: list[dict[str, Any]]) -> str:
  kind = rows[0]["documents_are"]
  header = [f"text, documents {kind}", "documents", "tokens", "nats/token"]
  header += ["perplexity", "bits/byte", "word perplexity"]
  keys = ("nats_per_token", "perplexity", "bits_per_byte", "word_perplexity")
  return format_table(
    header,
    [
      [row["data"], f"{row['documents']:,}", f"{row['tokens']:,}"]
      + [_number(row[key]) for key in keys]
      for row in rows
    ],
  )


def task_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
  """Lists the metrics of tasks and groups."""
  shots, samples = results.get("n-shot", {}), results.get("n-samples", {})
  rows = []
  for task, found in {
    **results["results"],
    **(results.get("groups") or {}),
  }.items():
    for key, value in found.items():
      metric, comma, name = key.partition(",")
      if not comma or metric.endswith("_stderr"):
        continue
      error = found.get(f"{metric}_stderr,{name}")
      row = {"task": task, "metric": metric, "filter": name, "value": value}
      row["stderr"] = error if isinstance(error, float) else None
      row["shots"] = shots.get(task)
      row["examples"] = samples.get(task, {}).get("effective")
      rows.append(row)
  return rows


def task_table(rows: list[dict[str, Any]]) -> str:
  header = ["task", "metric", "filter", "examples", "shots", "value", "stderr"]
  return format_table(
    header, [[_number(row[key]) for key in header] for row in rows]
  )


def answer_row(found: Answers, seconds: float) -> dict[str, Any]:
  """Builds the row of results for conversations, including all answers."""
  return {
    "conversations": found.conversations,
    "tokens": found.tokens,
    "nats": found.nats,
    "nats_per_token": found.nats_per_token,
    "perplexity": found.perplexity,
    "questions": len(found.answers),
    "left_out": found.left_out,
    "short_answers": found.short,
    "exact_match": found.exact_match,
    "seconds": seconds,
    "answers": [each._asdict() for each in found.answers],
  }


def answer_figures(
  models: Sequence[tuple[str, Answers]],
) -> tuple[list[str], list[list[str]]]:
  """Returns the header and rows of a table that compares models' answers."""
  header = ["model", "conversations", "questions", "nats/token", "perplexity"]
  header += ["short answers", "exact match"]
  rows = []
  for name, found in models:
    match = found.exact_match
    rows.append(
      [
        name,
        f"{found.conversations:,}",
        f"{len(found.answers):,}",
        format_number(found.nats_per_token),
        format_number(found.perplexity),
        f"{found.short:,}",
        "-" if match is None else f"{match:.1%}",
      ]
    )
  return header, rows


def answer_table(models: Sequence[tuple[str, Answers]]) -> str:
  return format_table(*answer_figures(models))


def _number(value: Any) -> str:
  if isinstance(value, float):
    return format_number(value)
  return "-" if value is None else str(value)


def versions() -> dict[str, str]:
  """Lists the kind of device, and the versions of Python and packages."""
  found = {"python": platform.python_version()}
  found["coat_jax"] = coat_jax.__version__
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found | {"device": jax.devices()[0].device_kind}


def write(path: Path, report: dict[str, Any]) -> None:
  """Writes a report as JSON, completely or not at all."""
  write_text(
    path, json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"
  )


def write_text(path: Path, text: str) -> None:
  """Writes a file, completely or not at all."""
  with save_errors(path), written_whole(path) as written:
    written.write_text(text, "utf-8")


def _finite(value: Any) -> Any:
  """Converts a value to JSON types; NaN and infinity become None."""
  if isinstance(value, dict):
    return {str(key): _finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  if hasattr(value, "item"):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  known = isinstance(value, str | int | float | None)
  return value if known else str(value)
