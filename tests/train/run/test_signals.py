# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM, sent to a subprocess."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train.run import exits, processes
from train.run.signals import Signals

ROOT = Path(__file__).parents[3]
PROGRAM = """
import hashlib, signal, sys, time
from train.run.signals import Signals
signal.signal(signal.SIGUSR1, lambda *_: None)  # Another library may do this.
with Signals() as signals:
  signals.is_deferred = "deferred" in sys.argv
  print("ready", flush=True)
  # One long call of C code without the GIL, like a compilation. Python runs no
  # signal handlers meanwhile.
  if "busy" in sys.argv:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
  while signals.received is None:
    time.sleep(0.01)
  print("received", flush=True)
  if "again" in sys.argv:
    time.sleep(60)
sys.exit(signals.exit_status)
"""


def start(*arguments):
  process = subprocess.Popen(
    [sys.executable, "-c", PROGRAM, *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "ready\n"
  return process


@pytest.mark.parametrize(
  "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
@pytest.mark.parametrize("words", [(), ("busy",)])
def test_signal_that_is_not_deferred_ends_the_process(words, number, status):
  process = start(*words)
  process.send_signal(number)
  _, errors = process.communicate(timeout=30)
  assert process.returncode == status
  assert f"{number.name}: stopped at once" in errors


@pytest.mark.parametrize(
  "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_deferred_signal_lets_the_program_finish(number, status):
  process = start("deferred")
  process.send_signal(number)
  output, errors = process.communicate(timeout=30)
  assert (process.returncode, output) == (status, "received\n")
  assert "saving after this step" in errors


def test_signal_that_another_library_handles_is_not_caught():
  process = start("deferred")
  process.send_signal(signal.SIGUSR1)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(0.5)
  process.send_signal(signal.SIGTERM)
  output, errors = process.communicate(timeout=30)
  assert (process.returncode, output) == (143, "received\n")
  assert "SIGUSR1" not in errors


def test_second_signal_ends_the_process():
  process = start("deferred", "again")
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == "received\n"
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=30)
  assert process.returncode == 130


def test_signal_during_the_gather_is_not_lost(
  monkeypatch,
):
  signals = Signals()

  def gather(value):
    if not value:
      signals.received = signal.SIGTERM
    return [value, 0]

  monkeypatch.setattr(processes, "gather", gather)
  assert not exits.is_received(signals)
  assert exits.is_received(signals)
  assert signals.exit_status == 143
