# SPDX-License-Identifier: Apache-2.0
"""Modules that are not commands name those that are; closed pipes are quiet."""

import os
import subprocess
import sys

import pytest

import train
from tests.docs.pages import ROOT


def test_commands_are_the_modules_that_run_as_programs():
  folder = ROOT / "train"
  programs = {
    ".".join(file.relative_to(folder).with_suffix("").parts)
    for file in folder.rglob("*.py")
    if '\nif __name__ == "__main__":\n' in file.read_text()
  }
  assert programs == {*train.COMMANDS}


@pytest.mark.parametrize(
  "name",
  ["train", "train.watch", "train.run.metrics", "train.data", "train.wtch"],
)
def test_error_lists_the_commands_if_a_module_is_not_one(name, capsys):
  with pytest.raises(SystemExit) as stopped:
    train.check_command(["python", "-X", "dev", "-m", name, "--help"])
  assert stopped.value.code == 2
  assert capsys.readouterr().err == (
    f"error: {name} is not a command; the commands are "
    "train.pretrain, train.finetune, train.vit, train.convert, train.generate, "
    "train.evaluate, train.plan, train.plot, train.data.digits, each with "
    "--help\n"
  )


@pytest.mark.parametrize(
  "line",
  [
    "python -m train.pretrain demo",
    "python -m train.data.digits",
    "python -m cProfile -m train.watch",
    "python -mtrain.watch",  # This form is not recognized.
    "python train/watch.py -m",
  ],
)
def test_other_command_lines_are_accepted(line):
  train.check_command(line.split())


@pytest.mark.slow
def test_python_prints_the_error():
  def run(*line):
    done = subprocess.run(
      [sys.executable, *line], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr

  status, text = run("-m", "train.watch", "--help")
  assert status == 2 and text.startswith("error: train.watch is not a command")
  assert run("-c", "import train.options") == (0, "")
  status, text = run("-m", "train.data.digits", "--help")
  assert status == 0 and "python -m train.data.digits" in text


@pytest.mark.slow
@pytest.mark.parametrize(
  "line",
  [
    "train.pretrain --help",
    "train.plan demo",
    "benchmarks.layer --help",
    "benchmarks.memory residuals --preset demo",
  ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_ends_a_command_quietly(line, unbuffered):
  reader, writer = os.pipe()
  os.close(reader)
  try:
    done = subprocess.run(
      [sys.executable, "-m", *line.split()],
      cwd=ROOT,
      stdout=writer,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
  finally:
    os.close(writer)
  assert (done.returncode, done.stderr) in [(0, ""), (1, "")]
