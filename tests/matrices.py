# SPDX-License-Identifier: Apache-2.0
"""Selects cases of parametrized tests, so that `make test` stays fast."""

import itertools
from collections.abc import Iterable

import pytest


def quick(count: int, cases: Iterable) -> list:
  """Marks all cases slow except the first `count`.

  Slow cases run only in `make test-all`.

  Args:
    count: number of cases to run in `make test`.
    cases: cases for `pytest.mark.parametrize`: arguments, tuples of arguments
      or `pytest.param`s.
  """
  out = []
  for i, case in enumerate(cases):
    if i >= count:
      values, marks, name = (
        (case.values, case.marks, case.id)
        if hasattr(case, "marks")
        else (case if isinstance(case, tuple) else (case,), (), None)
      )
      case = pytest.param(*values, marks=(*marks, pytest.mark.slow), id=name)
    out.append(case)
  return out


def pairwise(*options: Iterable) -> list[tuple]:
  """Selects combinations in which each pair of values of two options occurs.

  Use it where a bug would depend on at most two options. The first combination
  contains the first value of each option. Each further combination is the one
  with the most pairs that have not occurred yet.
  """
  every = [*itertools.product(*options)]
  new = {pair for case in every for pair in _pairs(case)}
  out = []
  while new:
    best = max(every, key=lambda case: len(new & _pairs(case)))
    out.append(best)
    new -= _pairs(best)
  return out


def _pairs(case):
  return {*itertools.combinations(enumerate(case), 2)}
