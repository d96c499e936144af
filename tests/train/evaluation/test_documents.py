# SPDX-License-Identifier: Apache-2.0
"""Reads texts from published kinds of files, and refuses other files."""

import gzip
import io
import json
import sys
import types

import pytest

from train.evaluation.documents import read_documents

LINES = [{"text": "One\ntwo"}, {"meta": {}, "text": "é 🦙"}]
JSONL = "\n".join(map(json.dumps, LINES)) + "\n\n"
TEXTS = [line["text"] for line in LINES]


def written(folder, name, content):
  file = folder / name
  content = content.encode() if isinstance(content, str) else content
  file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
  return str(file)


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.json", "a.json.gz", "a.b.JSONL"]
)
def test_each_json_line_is_a_document(tmp_path, name):
  # C4 and the Pile have this format.
  assert list(read_documents(written(tmp_path, name, JSONL))) == TEXTS


@pytest.mark.parametrize("name", ["wiki.test.tokens", "a.txt", "a.txt.gz", "a"])
def test_file_without_json_lines_is_one_document(tmp_path, name):
  text = " = Title = \n\n It ’s a text . \n"
  assert list(read_documents(written(tmp_path, name, text))) == [text]


def test_files_of_a_glob_are_read_in_order(tmp_path):
  written(tmp_path, "c4.00000.json.gz", JSONL)
  written(tmp_path, "c4.00001.json.gz", '{"text": "last"}')
  written(tmp_path, "other.txt", "no")
  found = list(read_documents(str(tmp_path / "c4.*.json.gz")))
  assert found == [*TEXTS, "last"]


def test_lone_surrogate_in_json_is_replaced(tmp_path):
  line = '{"text": "a\\ud83e b \\ud83e\\udd99"}'
  found = list(read_documents(written(tmp_path, "a.jsonl", line)))
  assert found == ["a\N{REPLACEMENT CHARACTER} b 🦙"]


class Zstandard(types.ModuleType):
  """Replaces the module zstandard, whose readers cannot iterate over lines."""

  ZstdError = gzip.BadGzipFile

  class ZstdDecompressor:
    def stream_reader(self, opened, *, read_across_frames):
      assert read_across_frames
      return Reader(opened)


class Reader(io.RawIOBase):
  def __init__(self, opened):
    self._file, self._opened = opened, gzip.GzipFile(fileobj=opened)

  def close(self):
    self._file.close()
    super().close()

  def readable(self):
    return True

  def readinto(self, buffer):
    found = self._opened.read(len(buffer))
    buffer[: len(found)] = found
    return len(found)

  def __next__(self):
    raise io.UnsupportedOperation


def test_zst_is_read_if_its_module_is_installed(tmp_path, monkeypatch):
  file = tmp_path / "val.jsonl.zst"
  file.write_bytes(gzip.compress(JSONL.encode()))
  monkeypatch.setitem(sys.modules, "zstandard", None)
  with pytest.raises(ValueError, match="zstandard, which is not installed"):
    list(read_documents(str(file)))
  monkeypatch.setitem(sys.modules, "zstandard", Zstandard("zstandard"))
  assert list(read_documents(str(file))) == TEXTS
  file.write_bytes(b"no such file")
  with pytest.raises(ValueError, match="must be a complete compressed file"):
    list(read_documents(str(file)))


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("a.parquet", "PAR1", "which is parquet; convert its texts"),
    ("a.parquet.gz", "PAR1", "which is parquet"),
    ("a.jsonl", '{"text": "x"}\n{"text"', "a.jsonl, line 2 must be a JSON"),
    ("a.jsonl", '{"text": 3}', "line 1 .* got the keys text"),
    ("a.jsonl", '\n{"content": ""}', "line 2 .* got the keys content"),
    ("a.json", '[{"text": "x"}]', "line 1 .* got a list"),
    ("a.jsonl", "[" * 99999, "line 1 must be a JSON object"),
    ("a.jsonl", b'{"text": "\xff"}', "line 1 must be a JSON object"),
    ("a.txt", b"a\xff", "must be text in UTF-8, got 'utf-8'"),
    ("a.bin", b"a\0", "must be text in UTF-8, got a zero byte"),
  ],
)
def test_files_that_are_neither_text_nor_json_lines_are_refused(
  tmp_path, name, content, message
):
  with pytest.raises(ValueError, match=message):
    list(read_documents(written(tmp_path, name, content)))


def test_damaged_compressed_files_are_refused(tmp_path):
  whole = gzip.compress(JSONL.encode() * 99)
  for content in (whole[:-9], b"no gzip", whole[:20] + b"\xff" * 20):
    (tmp_path / "a.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match="must be a complete compressed file"):
      list(read_documents(str(tmp_path / "a.json.gz")))


def test_missing_file_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="none.txt"):
    list(read_documents(str(tmp_path / "none.txt")))
