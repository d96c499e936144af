# SPDX-License-Identifier: Apache-2.0
"""Converts each notebook to a page with its text, its code and its output."""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "notebooks"


def on_files(files, config, **_):
  """Adds a page for each notebook; MkDocs calls this before it reads pages."""
  from mkdocs.structure.files import File

  for path in sorted(FOLDER.glob("*.ipynb")):
    page = f"notebooks/{path.stem}.md"
    files.append(File.generated(config, page, content=write_page(path)))


def write_page(path: Path) -> str:
  """Writes a notebook as a page that links to the notebook itself."""
  parts = []
  for cell in json.loads(path.read_text())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      # A link to another notebook must lead to its page.
      parts.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", source))
      continue
    parts.append(f"```python\n{source}\n```")
    printed = "".join("".join(x.get("text", "")) for x in cell["outputs"])
    if printed:
      parts.append(f"```text\n{printed.rstrip()}\n```")
  title, *rest = parts
  download = f"[Download this page as a notebook]({path.name}){{ download }}"
  return "\n\n".join([title, download, *rest]) + "\n"
