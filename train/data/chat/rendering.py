# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates in a process that can be killed; see `sandbox`.

Rendering the first template starts the process, which then renders all later
templates too. The process ends when the main process ends, whatever the reason.
"""

import atexit
import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from train.data.chat import sandbox

# Limits for rendering one text; real templates need milliseconds and megabytes.
# We limit CPU time, which does not depend on how busy the machine is.
SECONDS, MEMORY = 10, 2 * 2**30


class TemplateLimit(ValueError):
  """Raised if a template exceeds the limits on time, memory or output."""


class _Renderer:
  """The rendering process, which is restarted after it was killed."""

  def __init__(self):
    self._process: subprocess.Popen | None = None
    self._lock = threading.Lock()

  def ask(self, request: dict[str, Any]) -> dict[str, str]:
    """Sends a request and returns the answer.

    Raises EOFError(exit status) if the process ended. After any other exception
    we kill the process, because a late answer would be read as the answer to
    the next request.
    """
    with self._lock:
      if self._process is None:
        # -P: modules in sandbox.py's folder must not shadow Python's modules.
        self._process = subprocess.Popen(
          [sys.executable, "-P", str(Path(sandbox.__file__))],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.DEVNULL,
        )
      process = self._process
      assert process.stdin is not None and process.stdout is not None
      try:
        sandbox.send(process.stdin, request)
        answer, _ = sandbox.receive(process.stdout)
      except (EOFError, BrokenPipeError):
        raise EOFError(self._stop()) from None
      except BaseException:
        self.close()
        raise
      if "limit" in answer:
        self.close()  # The process may still hold the memory that it used.
      return answer

  def _stop(self) -> int:
    process, self._process = self._process, None
    assert process is not None
    for file in (process.stdin, process.stdout):
      with contextlib.suppress(
        BrokenPipeError
      ):  # Part of a request was unsent.
        file.close()  # pyright: ignore
    return process.wait()

  def close(self) -> None:
    """Kills the process."""
    if self._process is not None:
      self._process.kill()
      self._stop()


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)


def ask(source: str, **options: Any) -> dict[str, str]:
  """Renders a template; `sandbox` documents the options and the answer."""
  request = {"source": source, **options}
  try:
    answer = _RENDERER.ask({**request, "seconds": SECONDS, "memory": MEMORY})
  except EOFError as error:
    (status,) = error.args
    is_late = status == -signal.SIGXCPU
    late = f"it needs more than {SECONDS} seconds"
    died = f"it ended the Python process with exit status {status}"
    answer = {"limit": late if is_late else died}
  if "limit" in answer:
    raise TemplateLimit(
      f"chat: the template rendered no text: {answer['limit']}; use another "
      "template"
    )
  return answer
