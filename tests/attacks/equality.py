# SPDX-License-Identifier: Apache-2.0
"""Checks that two runs are equal bit for bit, except for their speed."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.writing import quietly


class Lost(Exception):
  """Raised if something was lost or differs."""


def check_runs(out: Path, expected: Path) -> None:
  """Compares metrics.jsonl, the last checkpoint, and the sampled answers.

  Raises:
    Lost: they differ; the message says how.
  """
  rows, want = (_rows(path) for path in (out, expected))
  if rows != want:
    other = next(x for x in itertools.zip_longest(rows, want) if x[0] != x[1])
    raise Lost(f"{out}: metrics.jsonl has {other[0]} instead of {other[1]}")
  samples, want = (_samples(path) for path in (out, expected))
  if samples != want:
    raise Lost(f"{out}: samples.jsonl has {samples!r} instead of {want!r}")
  last = str(RunDirectory(expected).latest_step())
  check_checkpoints(
    *(RunDirectory(path).checkpoints / last for path in (out, expected))
  )


def check_checkpoints(folder: Path, expected: Path) -> None:
  """Compares the arrays, and the position in the data.

  Raises:
    Lost: they differ; the message names the arrays.
  """
  saved, want = (_contents(path) for path in (folder, expected))
  if saved != want:
    names = saved.keys() | want.keys()
    other = [name for name in names if saved.get(name) != want.get(name)]
    raise Lost(f"{folder}: different bytes in {', '.join(sorted(other))}")


def _rows(out: Path) -> list[dict]:
  return [
    {name: x for name, x in row.items() if not name.endswith("tokens_per_s")}
    for row in read_metrics(out / "metrics.jsonl")
  ]


def _samples(out: Path) -> str | None:
  file = RunDirectory(out).samples
  return file.read_text() if file.exists() else None


def _contents(folder: Path) -> dict:
  """Returns the bytes of all arrays by name, and the position in the data."""
  found = {"data": json.loads((folder / "data" / "metadata").read_text())}
  for path in (
    folder / item for item in ("params", "optimizer", "exact", "clip")
  ):
    if not path.is_dir():
      continue
    with quietly():  # Orbax warns that its own metadata is missing.
      checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
      tree = checkpointer.metadata(path.absolute()).item_metadata.tree
      how = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
      )
      tree = checkpointer.restore(
        path.absolute(), args=ocp.args.PyTreeRestore(None, how)
      )
    for name, leaf in jax.tree.leaves_with_path(tree):
      found[path.name + jax.tree_util.keystr(name)] = np.asarray(leaf).tobytes()
  return found
