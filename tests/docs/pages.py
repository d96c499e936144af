# SPDX-License-Identifier: Apache-2.0
"""Finds the pages of the documentation, their rows and their Python."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The log keeps commands of earlier versions, so its Python is not run.
LOGS = sorted((DOCS / "log").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted({*DOCS.rglob("*.md")} - {*LOGS})]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

# The title of a block, which readers see, gives the reason for not running it.
NOT_RUN = 'title="Not run by the tests: '
_BLOCK = re.compile(r"^```python(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def measured(name: str) -> list[dict]:
  """Returns the rows in docs/rows/NAME.jsonl."""
  lines = (DOCS / "rows" / f"{name}.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def python_blocks(text: str) -> list[str]:
  """Returns the blocks of Python that tests run.

  Blank lines before each block make tracebacks name the right line.

  Raises:
    ValueError: a block has another title, or is indented.
  """
  blocks = []
  for match in _BLOCK.finditer(text):
    options = match[1].strip()
    if options.startswith(NOT_RUN):
      continue
    if options:
      raise ValueError(
        f"docs: a block of Python is run, or its title begins {NOT_RUN!r}, got "
        f"{options!r}"
      )
    lines_before = text[: match.start(2)].count("\n")
    blocks.append("\n" * lines_before + match[2])
  if len(_BLOCK.findall(text)) != len(re.findall(r"```\s*py", text)):
    raise ValueError(
      "docs: Python is in blocks ```python that are not indented, got another "
      "kind; no test would run it"
    )
  return blocks


def run_page(name: str) -> dict:
  """Runs a page's Python, block after block; returns the names it defines."""
  names = {"__name__": "__main__"}
  for block in python_blocks((ROOT / name).read_text()):
    exec(compile(block, str(ROOT / name), "exec"), names)
  return names
