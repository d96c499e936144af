# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and a command's data.

`train.loop` is the same for all commands; each command adds a configuration and
a `RunData`.
"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

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
  to_iterator,
  train_batches,
)
from train.run.directory import RunDirectory

if TYPE_CHECKING:  # It imports this module.
  from train.conversations import HeldOutSamples


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunData[Config: TrainConfig]:
  """The data of a run.

  Attributes:
    rows: Rows to train on, with the array names that `batch_of` of the run's
      `train.objective` expects.
    held_out: Rows to evaluate.
    fingerprint: A hash of the data, which must not change on resuming.
    change_times: A hash of the files' times if the fingerprint does not read
      whole files.
    threads: Threads that read batches ahead; 0 for data in memory.
  """

  rows: Rows
  held_out: Rows
  fingerprint: str
  change_times: str | None = None
  threads: int = 0

  def batch_shapes(self, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a global batch."""
    return {
      name: jax.ShapeDtypeStruct((config.batch, *x.shape), x.dtype)
      for name, x in self.rows.read(None).items()
    }

  def train_batches(
    self, config: Config, **own_rows: int
  ) -> grain.DatasetIterator:
    """Makes the endless iterator whose position checkpoints store."""
    found = train_batches(
      self.rows, batch_size=config.batch, seed=config.seed, **own_rows
    )
    return to_iterator(found, threads=self.threads)

  def eval_batches(
    self, config: Config, **own_rows: int
  ) -> Iterable[dict[str, np.ndarray]]:
    """Makes the held-out batches, the same in every evaluation."""
    found = held_out_batches(
      self.held_out,
      batch_size=config.batch,
      max_batches=config.eval_batches,
      **own_rows,
    )
    return read_ahead(found, threads=self.threads)

  def keep_files(self, run: RunDirectory) -> None:
    """Writes the data's files into the folder of a new run."""
    del run

  def open_samples(
    self,
    config: Config,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    *,
    resumed_step: int,
  ) -> "HeldOutSamples | None":
    """Opens a writer of samples; None if there are none."""
    del config, graph, mesh, resumed_step
