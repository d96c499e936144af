# SPDX-License-Identifier: Apache-2.0
"""Runs the command that kills runs, with a few kills."""

import pytest

from tests.attacks import kills


@pytest.mark.slow  # Each kill starts programs.
@pytest.mark.parametrize("program", ["pretrain", "decoder"])
def test_killed_runs_end_like_uninterrupted_runs(program, capsys):
  line = ["--count", "6", "--seed", "1", "--programs", program]
  assert kills.main(line) == 0
  assert "6 kills, all runs bit-equal, none lost" in capsys.readouterr().out
