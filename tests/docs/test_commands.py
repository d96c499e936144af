# SPDX-License-Identifier: Apache-2.0
"""Tests the commands page, which shows the options of every program."""

import pytest

from docs.building import commands


def test_every_training_program_is_in_the_table():
  programs = commands.commands("train")
  assert {*commands._PAGES} == {*programs}
  assert {*commands._SUBCOMMANDS} <= {*programs}
  assert "benchmarks.ops" in commands.commands("benchmarks")


def test_pages_that_explain_programs_mention_them():
  for command, page in commands._PAGES.items():
    text = (commands.ROOT / "docs" / page).read_text()
    assert f"python -m {command}" in text, (command, page)


@pytest.mark.parametrize(
  ("command", "subcommand", "option"),
  [
    ("train.plan", "", "--hbm STR"),
    ("train.convert", "export-hf", "usage: python -m train.convert export-hf"),
    ("benchmarks.optimizer", "", "-h, --help"),
  ],
)
def test_help_comes_from_the_program(command, subcommand, option, capsys):
  text = commands.help_of(command, subcommand)
  assert option in text
  assert capsys.readouterr().out == ""


def test_command_without_help_is_refused():
  with pytest.raises(ValueError, match="train.plan no-such has no help"):
    commands.help_of("train.plan", "no-such")
