# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates in a process that can be ended: see `sandbox`.

The process starts with the first text, stays for all others, and ends with this
one, however that ends.
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

# Of a text; templates in use take milliseconds and megabytes. The time is the
# processor's, so that a busy machine changes nothing.
SECONDS, MEMORY = 10, 2 * 2**30


class TemplateLimit(ValueError):
  """A template takes more time or memory, or writes more, than any needs."""


class _Renderer:
  """The process, which is started anew where it was ended."""

  def __init__(self):
    self._process: subprocess.Popen | None = None
    self._lock = threading.Lock()

  def ask(self, request: dict[str, Any]) -> dict[str, str]:
    """Sends a request and returns the answer; raises EOFError with the status.

    Anything else that is raised meanwhile ends the process too: its answer
    would be taken for that of the next request.
    """
    with self._lock:
      if self._process is None:
        # -P: modules beside the program are not found instead of Python's own.
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
        self.close()  # It may still hold what was too large.
      return answer

  def _stop(self) -> int:
    process, self._process = self._process, None
    assert process is not None
    for file in (process.stdin, process.stdout):
      with contextlib.suppress(BrokenPipeError):  # Of what was not sent.
        file.close()  # pyright: ignore
    return process.wait()

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._stop()


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)


def ask(
  source: str, *, is_marked: bool, now: str | None, variables: dict[str, Any]
) -> dict[str, str]:
  """Renders a template."""
  request = {
    **{"source": source, "is_marked": is_marked, "now": now},
    **{"variables": variables, "seconds": SECONDS, "memory": MEMORY},
  }
  try:
    answer = _RENDERER.ask(request)
  except EOFError as error:
    (status,) = error.args
    is_late = status == -signal.SIGXCPU
    got = f"one that needs more than {SECONDS} seconds"
    answer = {"limit": got if is_late else f"one that ended Python ({status})"}
  if "limit" in answer:
    raise TemplateLimit(
      f"chat: the template must make a text and end, got {answer['limit']}; "
      "take another template"
    )
  return answer
