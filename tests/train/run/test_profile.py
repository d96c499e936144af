# SPDX-License-Identifier: Apache-2.0
"""Traces of some steps with jax.profiler."""

import jax
import pytest

from train.options import read_profile
from train.run import processes
from train.run.profile import Profiler


@pytest.fixture
def calls(monkeypatch):
  """Records calls to jax.profiler."""
  found = []
  profiler = jax.profiler
  monkeypatch.setattr(profiler, "start_trace", lambda p: found.append("start"))
  monkeypatch.setattr(profiler, "stop_trace", lambda: found.append("stop"))
  return found


def traced(text, steps, calls):
  """Returns the traced steps of a run of `steps` steps."""
  profiler = Profiler(text, "folder")
  found = []
  for step in range(steps):
    profiler.before_step()
    if len(calls) == 1:
      found.append(step)
  profiler.close()
  assert calls in ([], ["start", "stop"])
  return found


@pytest.mark.parametrize(
  "text, steps, expected",
  [
    ("2", 20, [5, 6]),
    ("3:4", 20, [4, 5, 6]),
    ("1:0", 3, [0]),
    ("3:1", 3, [1, 2]),
    ("3:5", 3, []),
    ("", 20, []),
  ],
)
def test_requested_steps_are_traced(text, steps, expected, calls):
  assert traced(text, steps, calls) == expected


def test_only_the_first_process_traces(calls, monkeypatch):
  monkeypatch.setattr(processes, "is_primary", lambda: False)
  assert traced("2", 20, calls) == []


@pytest.mark.parametrize("text", ["0", "-1", "5:", ":5", "x", "1e3", "9" * 400])
def test_malformed_option_is_refused(text):
  with pytest.raises(ValueError, match="such as 5, or 5:100"):
    read_profile(text)
