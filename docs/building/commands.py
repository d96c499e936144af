# SPDX-License-Identifier: Apache-2.0
"""Writes a page of all commands and options from their `--help`."""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
PAGE = "reference/commands.md"
FOLDERS = {
  "train": "Programs",
  "benchmarks": "Benchmarks",
  "studies": "Studies",
}
# The presets of a command have the same options; the page shows one preset.
_SUBCOMMANDS = {
  "train.pretrain": ("demo",),
  "train.vit": ("vit_digits",),
  "train.convert": ("export", "import", "export-hf", "import-hf"),
}
_HEAD = """\
# Commands and options

Use this page to look up an option without running `--help`. It is generated \
from the programs. To learn what a program is for, start with the \
page that the table links to.

Run every command in a checkout. Defaults are in parentheses.

Options of `train.pretrain` and `train.vit` are shown for one preset each. \
Other presets have the same options with other defaults.

"""
_PAGES = {
  "train.convert": "checkpoints.md",
  "train.data.digits": "vision.md",
  "train.evaluate": "evaluate.md",
  "train.finetune": "finetune.md",
  "train.generate": "generate.md",
  "train.plan": "plan.md",
  "train.plot": "training.md",
  "train.pretrain": "training.md",
  "train.vit": "vision.md",
}


def on_files(files, config, **_):
  """Adds the page; MkDocs calls this with the files of the site."""
  from mkdocs.structure.files import File

  files.append(File.generated(config, PAGE, content=write_page()))
  return files


def commands(folder: str) -> list[str]:
  """Lists the modules of a folder that are commands with options."""
  return sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / folder).rglob("*.py")
    if path.parent.name != "peers"  # They import other libraries, like torch.
    and '"__main__"' in (text := path.read_text())
    and re.search(r"^import argparse$|^import tyro$|read_options\(", text, re.M)
  )


def help_of(command: str, subcommand: str = "") -> str:
  """Returns what a command prints for `--help`."""
  words = [f"python -m {command}", *subcommand.split(), "--help"]
  printed = io.StringIO()
  with (
    mock.patch.object(sys, "argv", words),
    mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
    contextlib.redirect_stdout(printed),
    contextlib.suppress(SystemExit),
  ):
    importlib.import_module(command).main()
  lines = [line.rstrip() for line in printed.getvalue().splitlines()]
  if not lines or not lines[0].startswith("usage: "):
    raise ValueError(f"docs: {command} {subcommand} has no help, got {lines}")
  return "\n".join(lines).strip()


def write_page() -> str:
  """Returns the text of the page."""
  parts = [_HEAD]
  for folder, title in FOLDERS.items():
    names = commands(folder)
    parts.append(f"## {title}\n\n| command | explained in |\n| --- | --- |\n")
    for name in names:
      page = _PAGES.get(name)
      where = f"[{page.removesuffix('.md')}](../{page})" if page else ""
      anchor = name.replace(".", "").lower()
      parts.append(f"| [`{name}`](#{anchor}) | {where} |\n")
    for name in names:
      parts.append(f"\n### {name}\n\n```text\n{help_of(name)}\n```\n")
      for subcommand in _SUBCOMMANDS.get(name, ()):
        text = help_of(name, subcommand)
        parts.append(f"\n#### {name} {subcommand}\n\n```text\n{text}\n```\n")
    parts.append("\n")
  return "".join(parts)
