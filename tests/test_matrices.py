# SPDX-License-Identifier: Apache-2.0
"""Tests how `tests.matrices` selects cases."""

import itertools

from tests.matrices import pairwise


def test_pairwise_contains_all_pairs_of_values():
  options = "abcde", (True, False), (None, 7, 9), "xy"
  cases = pairwise(*options)
  assert cases[0] == ("a", True, None, "x")
  assert 15 <= len(cases) <= 20 < 60  # At least 5 * 3.
  for i, j in itertools.combinations(range(4), 2):
    met = {(case[i], case[j]) for case in cases}
    assert met == {*itertools.product(options[i], options[j])}
