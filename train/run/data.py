# SPDX-License-Identifier: Apache-2.0
"""What a run learns from, and what only its command does with its folder.

`train.loop` is the same for all commands; a command is a configuration and a
`RunData`.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import grain
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from train.config import TrainConfig
from train.run.directory import RunDirectory

# A process's rows of a batch: arrays [rows, T + 1], or as `batch_shapes`.
OwnRows = Mapping[str, np.ndarray]


class Samples(Protocol):
  """What a run writes after evaluations, for a person to look at."""

  def write(self, step: int, params: Any) -> list[str]:
    """Generates with the parameters after a step; returns lines to print."""
    ...

  def close(self) -> None:
    """Closes the file."""
    ...


class RunData[Config: TrainConfig](abc.ABC):
  """The data of a run.

  Attributes:
    dtypes: Of the arrays [B, T + 1] of a batch, by the names by which the
      `batch_of` of the run's `train.objective` takes them.
    fingerprint: A hash of the data; a resumed run must have the same.
    change_times: A hash of the files' times, where the fingerprint does not
      see all; else None.
  """

  dtypes: ClassVar[Mapping[str, DTypeLike]]

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str: ...

  @property
  def change_times(self) -> str | None:
    return None

  def has_fingerprint(self, stored: str) -> bool:
    """Whether a checkpoint's fingerprint is of these data."""
    return stored == self.fingerprint

  def batch_shapes(self, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of all processes, for data that are no tokens too."""
    shape = config.batch, config.seq + 1
    return {
      name: jax.ShapeDtypeStruct(shape, dtype)
      for name, dtype in self.dtypes.items()
    }

  @abc.abstractmethod
  def train_batches(
    self, config: Config, *, process_index: int, process_count: int
  ) -> grain.DatasetIterator:
    """Makes an endless iterator whose place is saved.

    Args:
      config: The run's.
      process_index: Of this process's rows, from `processes.own_rows`.
      process_count: Likewise.

    Returns:
      An iterator of dicts of this process's rows.

    Raises:
      ValueError: sizes that do not fit each other or the data.
    """

  @abc.abstractmethod
  def eval_batches(
    self, config: Config, *, process_index: int, process_count: int
  ) -> Iterable[OwnRows]:
    """Makes the held-out batches, the same ones in every evaluation.

    Args and Raises: as of `train_batches`.
    """

  def keep_files(self, run: RunDirectory) -> None:
    """Writes what belongs to the data into a run's new folder."""
    del run

  def open_samples(
    self,
    config: Config,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    *,
    resumed_step: int,
  ) -> Samples | None:
    """Opens what writes samples at evaluations; None where nothing does.

    Args:
      config: The run's.
      graph: Its model without its weights.
      mesh: Its devices, or None.
      resumed_step: Steps done before.
    """
    del config, graph, mesh, resumed_step
