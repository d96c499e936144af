# SPDX-License-Identifier: Apache-2.0
"""Finds the notebooks, runs their cells, and stores what they print.

`python -m tests.docs.notebooks` runs all of them and stores their outputs.
"""

import contextlib
import io
import json
from pathlib import Path

from tests.docs.pages import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def read(path: Path) -> dict:
  return json.loads(path.read_text())


def code_cells(notebook: dict) -> list[dict]:
  return [x for x in notebook["cells"] if x["cell_type"] == "code"]


def stored_output(cell: dict) -> str:
  """Returns what a cell printed when the notebook was stored."""
  return "".join("".join(x.get("text", "")) for x in cell["outputs"])


def run(path: Path) -> tuple[dict, list[str]]:
  """Runs all cells; returns the names they define and what each prints."""
  names, printed = {"__name__": "__main__"}, []
  for i, cell in enumerate(code_cells(read(path))):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      code = compile("".join(cell["source"]), f"{path}, cell {i + 1}", "exec")
      exec(code, names)
    printed.append(out.getvalue())
  return names, printed


def store_outputs(path: Path) -> None:
  notebook = read(path)
  _, printed = run(path)
  pairs = zip(code_cells(notebook), printed, strict=True)
  for i, (cell, text) in enumerate(pairs):
    stream = {"name": "stdout", "output_type": "stream"}
    lines = text.splitlines(keepends=True)
    cell["outputs"] = [stream | {"text": lines}] if text else []
    cell["execution_count"] = i + 1
  text = json.dumps(notebook, indent=1, ensure_ascii=False)
  path.write_text(text + "\n")


if __name__ == "__main__":
  for path in NOTEBOOKS:
    store_outputs(path)
