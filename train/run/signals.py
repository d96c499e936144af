# SPDX-License-Identifier: Apache-2.0
"""Handles SIGINT and SIGTERM, so that a run can save before it stops.

Python runs signal handlers only between bytecode instructions, so Ctrl-C would
do nothing during a long compilation. Here a pipe passes the signal's number to
a thread, which reacts immediately.

We do not use Orbax's `reached_preemption`. It needs JAX's coordination service,
handles only SIGTERM, and stops some steps later.
"""

import os
import signal
import sys
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
  """Context manager that handles SIGINT and SIGTERM."""

  # If False, a signal ends the process. If True, the first signal only sets
  # `received`, so that the training loop can save and stop. A second signal
  # ends the process.
  is_deferred = False
  received: int | None = None  # The number of the deferred signal.

  def __enter__(self) -> "Signals":
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._handlers = {s: signal.signal(s, lambda *_: None) for s in SIGNALS}
    self._wakeup = signal.set_wakeup_fd(self._writer)
    self._thread = threading.Thread(target=self._listen, daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    signal.set_wakeup_fd(self._wakeup)
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    os.close(self._writer)
    self._thread.join()
    os.close(self._reader)

  @property
  def exit_status(self) -> int:
    """Returns 128 plus the received signal's number, as shells do."""
    return 128 + (self.received or 0)

  def _listen(self) -> None:
    while number := os.read(self._reader, 1):
      number = number[0]
      if number not in SIGNALS:  # Another library handles this signal.
        continue
      name = signal.Signals(number).name
      if self.is_deferred and self.received is None:
        self.received = number
        _say(f"{name}: saving after this step; a second signal stops at once")
      else:
        _say(f"{name}: stopped at once")
        os._exit(128 + number)


def _say(text: str) -> None:
  print(f"\n{text}", file=sys.stderr, flush=True)
