# SPDX-License-Identifier: Apache-2.0
"""Token files: reading slices, even if the files change meanwhile."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from train.data import token_files
from train.data.token_files import open_tokens
from train.data.tokens import DataConfig, load_tokens


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("has_header", [False, True])
def test_files_are_read_with_and_without_header(tmp_path, dtype, has_header):
  ids = np.arange(5000, dtype=dtype)
  for name, part in [("a.npy", ids[:3000]), ("b.npy", ids[3000:])]:
    if has_header:
      np.save(tmp_path / name, part)
    else:
      part.tofile(tmp_path / name)
  config = DataConfig(path=str(tmp_path), dtype=dtype)
  tokens = load_tokens(config, 5000)
  assert tokens.threads > 0
  np.testing.assert_array_equal(tokens.read(0, 5000), ids)
  np.testing.assert_array_equal(tokens.parts[1][:10], ids[3000:3010])
  assert len(tokens.parts[0][3000:]) == 0


@pytest.mark.parametrize("has_header", [False, True])
def test_reading_beyond_the_end_of_a_truncated_file_raises(
  tmp_path, has_header
):
  path = tmp_path / "ids.npy"
  ids = np.arange(5000, dtype=np.uint16)
  np.save(path, ids) if has_header else ids.tofile(path)
  (file,) = open_tokens(str(path), "uint16")
  np.testing.assert_array_equal(file[4000:], ids[4000:])
  os.truncate(path, 4096)
  np.testing.assert_array_equal(file[:1000], ids[:1000])
  words = f"must have at least {file.offset + 10000} bytes, .* got 4096;"
  with pytest.raises(ValueError, match=f"ids.npy {words}"):
    file[1900:3000]
  with pytest.raises(ValueError, match=f"ids.npy {words}"):
    file[4000:]  # This slice begins after the end.


def test_replaced_file_is_read_when_opened_again(tmp_path):
  path = tmp_path / "ids.bin"
  for fill in (1, 2):
    np.full(9, fill, np.uint16).tofile(tmp_path / "new")
    os.replace(tmp_path / "new", path)
    (file,) = open_tokens(str(path), "uint16")
    assert file[:].tolist() == [fill] * 9


def test_threads_read_more_files_than_are_kept_open(tmp_path, monkeypatch):
  kept = token_files.functools.lru_cache(maxsize=2)(token_files._Opened)
  monkeypatch.setattr(token_files, "_opened", kept)
  for i in range(8):
    np.full(100, i, np.uint16).tofile(tmp_path / f"{i}.bin")
  files = open_tokens(str(tmp_path), "uint16")
  before = len(os.listdir("/proc/self/fd"))
  with ThreadPoolExecutor(8) as pool:
    read = list(pool.map(lambda i: files[i % 8][:].tolist(), range(400)))
  assert read == [[i % 8] * 100 for i in range(400)]
  assert len(os.listdir("/proc/self/fd")) <= before + 2
