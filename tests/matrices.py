# SPDX-License-Identifier: Apache-2.0
"""Matrices of cases: a few in every run, the others in `make test-all`."""

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
