# SPDX-License-Identifier: Apache-2.0
"""Traces some steps of a run with jax.profiler.

`tensorboard --logdir RUN/profile` (with the plugin of `xprof`) shows the trace,
and ui.perfetto.dev its trace.json.gz.
"""

from pathlib import Path

import jax

from train.options import read_profile


class Profiler:
  """Traces the steps that `--profile` asks for."""

  def __init__(self, text: str, folder: Path, *, is_silent: bool = False):
    """Reads what to trace; nothing is started yet.

    Args:
      text: The option; "" traces nothing.
      folder: Of traces.
      is_silent: Trace nothing, because another process does.
    """
    self._folder, self._is_on = folder, False
    self._count, self._wait = (0, 0) if is_silent else read_profile(text)

  def before_step(self) -> str | None:
    """Starts or ends the trace; to be called before each step.

    Returns:
      A line to print, when a trace has ended.
    """
    if self._is_on:
      self._count -= 1
      return None if self._count else self.close()
    if self._count and not self._wait:
      jax.profiler.start_trace(str(self._folder))
      self._is_on = True
    self._wait -= 1
    return None

  def close(self) -> str | None:
    """Ends a trace that has not ended yet; returns the line to print."""
    if not self._is_on:
      return None
    self._is_on = False
    jax.profiler.stop_trace()
    return f"{self._folder}: a trace of some steps"
