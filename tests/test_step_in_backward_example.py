# SPDX-License-Identifier: Apache-2.0
"""Runs the example that updates a user's model in its backward pass."""

import re

import pytest

from examples import step_in_backward


@pytest.mark.slow
def test_example_learns_in_less_memory(capsys):
  losses = step_in_backward.main()
  assert losses[0] > 3.4 and losses[-1] < 1
  first, inside = re.findall(r": ([\d.]+) MB", capsys.readouterr().out)
  # Memory holds the gradients of one of four layers at a time.
  assert float(inside) < 0.6 * float(first)
