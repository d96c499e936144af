# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines: exit status 2, and a sentence that names the option."""

import re

import pytest
import tyro

from train import (
  convert,
  evaluate,
  finetune,
  generate,
  plan,
  plot,
  pretrain,
  vit,
)
from train.command_line import error_line, plain_errors
from train.data import digits

NONE = "/no/such"
# The arguments with which each command gets as far as reading its files.
WHOLE = {
  pretrain: ["demo", "--out", "{out}", "--data.path", NONE],
  finetune: [NONE, "--out", "{out}", "--data", NONE],
  vit: ["vit_digits", "--out", "{out}", "--data", NONE],
  convert: ["export-hf", NONE, "--out", "{out}"],
  evaluate: [NONE, "--data", NONE],
  generate: [NONE, "--prompt", "a"],
  plan: ["demo", "--init-from", NONE],
  plot: [NONE],
}
COMMANDS = [*WHOLE, digits]


def said(command, line, tmp_path, capsys):
  """Returns what a wrong command line prints, on one line without frames."""
  out = tmp_path / "out"
  try:
    status = command.main([word.format(out=out) for word in line])
  except SystemExit as stop:
    status = stop.code
  assert status == 2 and not out.exists()
  text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
  # Errors must not contain names from the code or from tyro.
  assert not re.search(r"tyro|Traceback|\w+Config\b", text), text
  return text


def _name(command):
  return command.__name__


@pytest.mark.parametrize("command", COMMANDS, ids=_name)
def test_unknown_option_is_named(command, tmp_path, capsys):
  line = [*WHOLE.get(command, [str(tmp_path)]), "--no-such-flag", "1"]
  text = said(command, line, tmp_path, capsys)
  assert "--no-such-flag" in text and "--help" in text


@pytest.mark.parametrize("command", COMMANDS, ids=_name)
def test_missing_arguments_are_named(command, tmp_path, capsys):
  text = said(command, [], tmp_path, capsys)
  asked = ("Missing from", "Expected one of {", "name at least one run")
  assert any(words in text for words in asked)


@pytest.mark.parametrize("command", WHOLE, ids=_name)
def test_missing_file_is_named_with_a_remedy(command, tmp_path, capsys):
  text = said(command, WHOLE[command], tmp_path, capsys)
  assert re.search(rf"error: .*{NONE}.*; \w+", text)


@pytest.mark.parametrize("command", [pretrain, vit, plan], ids=_name)
def test_unknown_preset_is_named_with_the_known_presets(
  command, tmp_path, capsys
):
  text = said(command, ["dmeo"], tmp_path, capsys)
  assert "dmeo" in text and ("vit_s16" in text or "llama2_7b" in text)


@pytest.mark.parametrize(
  "command, line, words",
  [
    (pretrain, ["demo", "--steps", "0"], "error: steps must be a whole number"),
    (
      pretrain,
      ["demo", "--optim.lr", "0"],
      "error: optim: lr must be a number",
    ),
    (
      pretrain,
      ["demo", "--model.num-heads", "3"],
      "error: model: d_model must be",
    ),
    (
      pretrain,
      ["demo", "--mesh", "fsdp=2", "--batch", "3"],
      "error: mesh: batch must be",
    ),
    (pretrain, ["demo", "--steps", "x"], "Error parsing --steps: invalid"),
    (
      pretrain,
      ["demo", "--compare_seeds=2"],
      "error: --compare-seeds needs --compare; pass --compare bf16",
    ),
    (
      vit,
      ["vit_digits", "--compare", "None", "--compare-seeds", "1"],
      "error: --compare-seeds needs --compare; pass --compare bf16",
    ),
    (finetune, ["a", "--out", "b", "--epochs", "0"], "error: epochs must be"),
    (
      finetune,
      ["a", "--out", "b", "--epochs", "3", "--steps", "9"],
      "error: epochs and steps are mutually exclusive, got both; leave one out",
    ),
    (
      finetune,
      ["a", "--out", "b", "--samples", "0", "--sample-tokens", "9"],
      "error: sample_tokens applies to samples, got 0 of them; leave",
    ),
    (vit, ["vit_digits"], "got none; pass --data FOLDER"),
    (vit, ["vit_digits", "--optim.lr", "0"], "error: optim: lr must be"),
    (vit, ["vit_digits", "--held-out", "2"], "error: data: held_out must be"),
    (evaluate, ["a"], "error: evaluate: needs a text, a task or conversations"),
    (
      generate,
      ["a", "--prompt", "b", "--top-p", "2"],
      "error: generate: top_p must be at most 1, got 2.0; leave it out",
    ),
    (plan, ["demo", "--batch", "0"], "error: batch must be a whole number"),
    (plan, ["demo", "--gpus", "0"], "error: gpus must be a whole number"),
    (plan, ["demo", "--optimizer", "coat_lion", "--group-size", "0"], "error:"),
  ],
)
def test_impossible_values_are_reported_with_their_option(
  command, line, words, tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  assert words in said(command, line, tmp_path, capsys)


def test_other_errors_are_unchanged(capsys):
  assert error_line(ValueError("op: got 3")) == "error: op: got 3"
  with pytest.raises(SystemExit), plain_errors():
    tyro.cli(int, args=["x"], prog="p")
  assert "invalid literal" in capsys.readouterr().err
  with plain_errors():
    assert tyro.cli(int, args=["3"], prog="p") == 3
  assert capsys.readouterr().err == ""
