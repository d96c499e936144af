# SPDX-License-Identifier: Apache-2.0
"""Reads JSON rows that a study wrote earlier."""

import json
from pathlib import Path


def read_rows(path: Path, bench: str) -> list[dict]:
  """Reads the rows of a study; returns none if the file does not exist."""
  if not path.exists():
    return []
  name = bench.strip(".")
  rows = [json.loads(line) for line in path.read_text().splitlines() if line]
  for row in rows:
    if not str(row.get("bench")).startswith(bench):
      raise ValueError(
        f"{name}: {path} must contain rows of studies.{name}, got "
        f"{str(row)[:80]}; pass another file as --rows"
      )
  return rows
