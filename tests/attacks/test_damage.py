# SPDX-License-Identifier: Apache-2.0
"""Runs the command that damages checkpoints, and tests its checks."""

import pytest

from tests.attacks import damage
from train.run import checkpoint

# The tests damage many copies of a run, so only `make test-all` runs them.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", ["pretrain", "finetune"])
def test_no_damaged_checkpoint_is_trained_on(program, capsys):
  # With --every 8, eight files together try all 15 ways to damage a file.
  line = ["--resume", "2", "--every", "8", "--program", program]
  assert damage.main(line) == 0
  assert "damages, 0 trained on, 0 wrong steps" in capsys.readouterr().out


@pytest.mark.parametrize(
  "owner, name, words",
  [
    (checkpoint.checksums, "find_damage", "params removed: "),
    (
      checkpoint,
      "_find_other_step",
      "renamed to 15: Lost('step 15 was found')",
    ),
  ],
)
def test_planted_fault_is_found(monkeypatch, capsys, owner, name, words):
  monkeypatch.setattr(owner, name, lambda folder: None)
  assert damage.main(["--resume", "0"]) == 1
  assert words in capsys.readouterr().out
