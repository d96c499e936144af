# SPDX-License-Identifier: Apache-2.0
"""The program in `train`'s docstring needs only the files named there."""

import ast
import dataclasses
import math
import re
from pathlib import Path

import train
from tests.train.runs import MODEL
from train import presets

# The files and folders that the docstring names.
NEEDED = {
  *("step", "config", "optim_config", "options", "mesh", "presets", "data"),
  *("optimizers", "update", "weights"),
  *("objective", "finetune_config"),
}


def imported(path):
  """Yields the files and folders of `train` that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "train":
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      folder, _, name = (node.module or "").partition(".")
      if folder == "train":
        yield name.split(".")[0]


def test_files_of_a_minimal_program_import_no_others():
  root = Path(train.__file__).parent
  files = [f for f in root.rglob("*.py") if f != Path(train.__file__)]
  ours = [f for f in files if f.relative_to(root).parts[0][:-3] in NEEDED]
  ours += (root / "data").glob("*.py")
  assert len(ours) >= len(NEEDED)
  for file in ours:
    assert set(imported(file)) <= NEEDED, file


def test_minimal_program_trains(monkeypatch):
  small = dataclasses.replace(
    presets.demo().bf16_twin(seed=0, out="unused"),
    model=dataclasses.replace(presets.demo().model, **MODEL),
    steps=2,
    batch=2,
    seq=32,
  )
  monkeypatch.setattr(presets, "demo", lambda: small)
  (program,) = re.findall(r"```python\n(.*?)```", train.__doc__, re.DOTALL)
  found = {}
  exec(compile(program, train.__file__, "exec"), found)
  assert int(found["state"].step) == 2
  # After two batches the loss is nearly that of uniform guesses.
  assert abs(float(found["metrics"].loss) - math.log(256)) < 0.1
