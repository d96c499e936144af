# SPDX-License-Identifier: Apache-2.0
"""The command that kills runs, a few times."""

import pytest

from tests.attacks import kills


@pytest.mark.slow  # make test-all runs it: each kill starts programs.
@pytest.mark.parametrize("program", ["pretrain", "decoder"])
def test_killed_runs_end_as_undisturbed_ones(program, capsys):
  line = ["--count", "6", "--seed", "1", "--programs", program]
  assert kills.main(line) == 0
  assert "6 kills, all runs bit-equal, none lost" in capsys.readouterr().out
