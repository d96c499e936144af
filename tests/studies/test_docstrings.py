# SPDX-License-Identifier: Apache-2.0
"""Tests the conversion of Python source into conversations and tokens."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from studies import docstrings

SOURCE = '''\
import os


class Shape:
  def area(self, scale):
    """The area.

    Scaled.
    """
    return scale * self.side**2

  def plain(self):
    return 1


def one(): "In a line."; return 1


def only_words():
  """Nothing else."""


def blank():
  """\n  """
  return 2
'''


def test_function_with_docstring_and_body_becomes_a_conversation():
  (found,) = docstrings.conversations(SOURCE)
  asked, answered = found["messages"]
  assert asked["role"] == "user" and answered["role"] == "assistant"
  assert answered["content"] == "The area.\n\nScaled."
  assert asked["content"] == (
    "What does area do?\n\n"
    "def area(self, scale):\n  ...\n  return scale * self.side**2"
  )
  assert not list(docstrings.conversations("def broken("))


def test_files_contain_each_text_once(tmp_path, capsys):
  for folder in ("a", "b"):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "shape.py").write_text(SOURCE)
  (tmp_path / "b" / "other.py").write_text("x = 'é'\n")
  out = tmp_path / "out"
  arguments = [str(out), str(tmp_path / "a"), str(tmp_path / "b")]
  counts = docstrings.main([*arguments, "--vocab-size", "400"])
  assert counts["files"] == 2 and counts["conversations"] == 1
  tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
  ids = np.fromfile(out / "tokens.bin", np.uint16)
  assert len(ids) == counts["tokens"] and ids.max() < 400
  texts = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
  assert set(texts.split(docstrings.END)[:-1]) == {SOURCE, "x = 'é'\n"}
  rows = (out / "chats.jsonl").read_text("utf-8").splitlines()
  rows = [json.loads(row) for row in rows]
  assert rows == list(docstrings.conversations(SOURCE))
  source = json.loads((out / "source.json").read_text("utf-8"))
  assert source["folders"] == arguments[1:] and source["suffixes"] == [".py"]
  assert source["tokens"] == counts["tokens"]
  with pytest.raises(SystemExit):
    docstrings.main(arguments)  # Existing files are kept.
  assert "File exists" in capsys.readouterr().err


def test_suffixes_determine_which_files_are_read(tmp_path):
  (tmp_path / "shape.py").write_text(SOURCE)
  (tmp_path / "shape.h").write_text("struct Shape;\n")
  assert docstrings.read_sources([tmp_path]) == [SOURCE]
  both = docstrings.read_sources([tmp_path], (".py", ".h"))
  assert sorted(both) == sorted([SOURCE, "struct Shape;\n"])


def test_folders_without_python_are_refused(tmp_path, capsys):
  with pytest.raises(SystemExit):
    docstrings.main([str(tmp_path / "out"), str(tmp_path)])
  assert "must contain .py files, got none" in capsys.readouterr().err
