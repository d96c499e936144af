# SPDX-License-Identifier: Apache-2.0
"""Where commands read a run that they write in another form."""

from pathlib import Path

from coat_jax.models.hf.whole import check_free
from train.config import TrainConfig
from train.run.checkpoint import read_description
from train.run.description import configuration
from train.run.directory import RunDirectory


def newest_checkpoint(run: Path, out: Path) -> tuple[Path, int, TrainConfig]:
  """Finds a run's newest whole checkpoint.

  Args:
    run: Folder of the run, which may be training meanwhile.
    out: Folder that is to be created.

  Returns:
    The folder of its checkpoints, the checkpoint's step, and its configuration.

  Raises:
    ValueError: `run` is no run with a whole checkpoint, or `out` exists, is
      being written, or would be in a file.
  """
  source = RunDirectory(run)
  if source.latest_step() is None or not source.is_run():
    raise ValueError(
      f"export: {run} must hold a run with a checkpoint, got none; pass the "
      "--out of a run"
    )
  check_free("export", out)
  above = next(path for path in out.resolve().parents if path.exists())
  if not above.is_dir():
    raise ValueError(
      f"export: {out} must be in a folder, got the file {above}; pass another"
    )
  step, _ = source.newest_whole_step()
  description = read_description(source.checkpoints, step)
  return source.checkpoints, step, configuration(description)
