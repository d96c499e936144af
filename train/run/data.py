# SPDX-License-Identifier: Apache-2.0
"""Defines the interface between the training loop and a command's data."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import grain
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.config import TrainConfig
from train.data.batches import (
  Rows,
  held_out_batches,
  read_ahead,
  train_batches,
)
from train.run.directory import RunDirectory


class Samples(Protocol):
  """Generates answers during a run and writes them to a file."""

  def write(self, step: int, params: Any) -> list[str]:
    """Generates answers with these parameters; returns lines to print."""
    ...

  def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunData[Config: TrainConfig]:
  """The data of a run."""

  # Rows to train on. Their arrays have the names that the objective's
  # `batch_of` expects (`train.objective`).
  rows: Rows
  held_out: Rows
  fingerprint: str  # A hash of the data; a resumed run must have the same hash.
  # A hash of modification times; None if the fingerprint covers all data.
  change_times: str | None = None
  threads: int = 0  # Threads that prefetch batches; 0 for data in memory.

  def batch_shapes(self, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a global batch's arrays."""
    return {
      name: jax.ShapeDtypeStruct((config.batch, *x.shape), x.dtype)
      for name, x in self.rows.read(None).items()
    }

  def train_batches(
    self, config: Config, **own_rows: int
  ) -> grain.DatasetIterator:
    """Iterates endlessly over batches; checkpoints store the position."""
    found = train_batches(
      self.rows, batch_size=config.batch, seed=config.seed, **own_rows
    )
    return iter(read_ahead(found, threads=self.threads))

  def eval_batches(
    self, config: Config, **own_rows: int
  ) -> Iterable[dict[str, np.ndarray]]:
    """Returns the held-out batches, the same in every evaluation."""
    found = held_out_batches(
      self.held_out,
      batch_size=config.batch,
      max_batches=config.eval_batches,
      **own_rows,
    )
    return read_ahead(found, threads=self.threads)

  def keep_files(self, run: RunDirectory) -> None:
    """Writes files such as a chat template into a new run's folder."""
    del run

  def open_samples(
    self,
    config: Config,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    *,
    resumed_step: int,
  ) -> Samples | None:
    """Returns a writer of generated answers, or None to generate no answers."""
    del config, graph, mesh, resumed_step
