# SPDX-License-Identifier: Apache-2.0
"""Traces some steps of a run with jax.profiler, in the primary process.

View the trace with `tensorboard --logdir RUN/profile`, which needs the `xprof`
plugin, or open the trace.json.gz at ui.perfetto.dev.
"""

from pathlib import Path

import jax

from train.options import read_profile
from train.run import processes
from train.run.exits import say


class Profiler:
  """Traces the steps that `--profile` selects."""

  def __init__(self, text: str, folder: Path):
    self._folder, self._is_on = folder, False
    count, wait = read_profile(text) if processes.is_primary() else (0, 0)
    # Steps are counted from 0 when the run starts or resumes.
    self._steps, self._seen = range(wait, wait + count), 0

  @property
  def is_at_edge(self) -> bool:
    """Whether the next call to `before_step` will start or end a trace."""
    return (self._seen in self._steps) != self._is_on

  def before_step(self) -> None:
    """Starts or ends the trace if necessary; call this before each step."""
    is_traced = self._seen in self._steps
    self._seen += 1
    if is_traced and not self._is_on:
      jax.profiler.start_trace(str(self._folder))
      self._is_on = True
    elif not is_traced:
      self.close()

  def close(self) -> None:
    if self._is_on:
      self._is_on = False
      jax.profiler.stop_trace()
      say(f"{self._folder}: wrote a trace")
