# SPDX-License-Identifier: Apache-2.0
"""Makes some of the bad calls, and tests the checks that find faults."""

import pytest

from tests.attacks.calls import Outcome, attack, call
from tests.attacks.tables import bad_calls


@pytest.mark.slow
def test_wrong_calls_are_refused_and_change_nothing(tmp_path):
  found = dict(attack(tmp_path, every=10))
  assert len(found) >= 40
  wrong = {line: each.faults for line, each in found.items() if each.faults}
  assert wrong == {}


def test_bad_calls_cover_every_program():
  programs = {program for program, _, _ in bad_calls()}
  assert programs == {
    *(f"train.{name}" for name in ("pretrain", "plan", "plot", "convert")),
    "train.generate",
    *(f"benchmarks.{name}" for name in ("layer", "memory", "ops", "optimizer")),
    "benchmarks.training",
    *(f"studies.{name}" for name in ("accuracy", "table7")),
  }


@pytest.mark.parametrize(
  "status, output, changed, faults",
  [
    (2, "error: no", [], []),
    (0, "", [], ["accepted"]),
    (2, "", [], ["no text"]),
    ("raised", "Traceback (most", [], ["a traceback"]),
    ("too long", "x", [], ["did not end"]),
    (2, "error", ["changed run/config.json"], ["changed run/config.json"]),
  ],
)
def test_each_fault_of_a_call_is_named(status, output, changed, faults):
  assert Outcome(status, output, 1.0, changed).faults == faults


def test_calls_that_are_accepted_or_fail_or_hang_are_detected(monkeypatch):
  import train.plot

  def hang(_):
    while True:
      pass

  for main, status in (
    (lambda _: 0, 0),
    (lambda _: [{}], 0),
    (lambda _: 1 / 0, "raised"),
    (hang, "too long"),
  ):
    monkeypatch.setattr(train.plot, "main", main)
    assert call("train.plot", [], limit=1)[0] == status
