# SPDX-License-Identifier: Apache-2.0
"""Matrices of cases: a few in every run, the others in `make test-all`."""

import itertools
from collections.abc import Iterable

import pytest


def quick(count: int, cases: Iterable) -> list:
  """Cases for `pytest.mark.parametrize`, marked slow after the first `count`.

  Args:
    count: how many stand for all of them in `make test`.
    cases: arguments, tuples of arguments or `pytest.param`s.
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
  """Some of the product, in which any two values of two options meet.

  For options of which a fault needs two at most; the first case is that of the
  first values, and each further one has the most pairs that are new.
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
