# SPDX-License-Identifier: Apache-2.0
"""Token streams: what is read, in which order, and what is refused."""

import numpy as np
import pytest
import tokenizers

from tests.train.data.streams import numbered
from train.data import tokenizer
from train.data.tokens import DataConfig, load_tokens


@pytest.fixture
def text_file(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("To be, or not to be, that is the question.\n" * 40)
  return path


@pytest.fixture
def tokenizer_file(tmp_path):
  words = ["[UNK]", "<|endoftext|>", "one", "two", "three"]
  model = tokenizers.models.WordLevel(
    {word: id for id, word in enumerate(words)}, unk_token="[UNK]"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  path = tmp_path / "tokenizer.json"
  tokenizer.save(str(path))
  return path


def test_embedded_default_is_python_source_as_bytes(embedded):
  assert len(embedded) > 2**20
  assert b"import" in embedded.read(0, 2**16).astype(np.uint8).tobytes()


def test_reading_across_arrays_equals_a_slice_of_the_stream():
  tokens = numbered(1000, cuts=[1, 17, 500, 501])
  for start, stop in [(0, 1000), (0, 1), (16, 18), (499, 502), (7, 7)]:
    np.testing.assert_array_equal(
      tokens.read(start, stop), np.arange(start, stop)
    )


def test_fingerprint_depends_on_tokens_but_not_on_array_boundaries():
  assert numbered(1000).fingerprint == numbered(1000, cuts=[9]).fingerprint
  assert numbered(1000).fingerprint != numbered(1001).fingerprint


def test_folder_and_glob_read_only_text_files_sorted_by_name(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / "deep" / "b.txt").write_bytes(b"second")
  (tmp_path / "a.md").write_bytes(b"first ")
  (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
  (tmp_path / ".hidden").write_bytes(b"no")
  for path, want in [
    (tmp_path, b"first second"),
    (tmp_path / "**" / "*.txt", b"second"),
  ]:
    tokens = load_tokens(DataConfig(path=str(path)), 256)
    assert tokens.read(0, len(tokens)).astype(np.uint8).tobytes() == want


def test_tokenizer_appends_end_of_text_to_each_document(
  tmp_path, tokenizer_file
):
  (tmp_path / "a.txt").write_text("one two\n")
  (tmp_path / "b.txt").write_text("three one\n")
  config = DataConfig(
    path=str(tmp_path / "*.txt"), tokenizer=str(tokenizer_file)
  )
  tokens = load_tokens(config, 5)
  assert tokens.read(0, len(tokens)).tolist() == [2, 3, 1, 4, 2, 1]


def test_splitting_long_documents_does_not_change_the_tokens(
  tmp_path, tokenizer_file, monkeypatch
):
  (tmp_path / "a.txt").write_text("one two\n" * 50 + "three" * 9)
  config = DataConfig(
    path=str(tmp_path / "a.txt"), tokenizer=str(tokenizer_file)
  )
  whole = load_tokens(config, 5)
  monkeypatch.setattr(tokenizer, "PIECE", 60)
  cut = load_tokens(config, 5)
  np.testing.assert_array_equal(whole.read(0, 102), cut.read(0, 102))


def load(path, vocab_size=256, **kwargs):
  return load_tokens(DataConfig(path=str(path), **kwargs), vocab_size)


def test_data_config_rejects_invalid_options():
  for kwargs, words in [
    (dict(held_out=0.0), "held_out must be a number from 1e-06"),
    (dict(held_out=0.99), "held_out must be a number from 1e-06 to 0.5, got"),
    (dict(dtype="int64", path="x"), "dtype must be one of text, uint16"),
    (dict(dtype="uint16"), "needs a path"),
    (dict(dtype="uint16", path="x", tokenizer="t.json"), "requires dtype text"),
  ]:
    with pytest.raises(ValueError, match=words):
      DataConfig(**kwargs)


def test_missing_or_empty_data_raise_with_the_path(tmp_path):
  empty = tmp_path / "empty.txt"
  empty.touch()
  (tmp_path / "folder").mkdir()
  with pytest.raises(FileNotFoundError, match="path must exist, got .*nowhere"):
    load(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="at least one file"):
    load(tmp_path / "folder")
  with pytest.raises(FileNotFoundError, match="at least one file"):
    load(tmp_path / "*.rst")
  with pytest.raises(ValueError, match="must not be empty.*empty.txt"):
    load(empty)
  with pytest.raises(ValueError, match="must not be empty"):
    load(empty, dtype="uint16")


def test_binary_files_among_text_are_skipped_with_a_warning(tmp_path, caplog):
  (tmp_path / "a.txt").write_text("text " * 20)
  (tmp_path / "b.txt").write_text("text " * 20, "utf-16")
  assert len(load(tmp_path)) == 100
  assert "skipped 1 of 2 files" in caplog.text and "b.txt" in caplog.text


def test_binary_files_are_rejected_as_text(tmp_path):
  (tmp_path / "a.bin").write_bytes(b"\0\1")
  with pytest.raises(ValueError, match="pass dtype uint16 or uint32"):
    load(tmp_path / "a.bin")
  (tmp_path / "b.bin").write_bytes(b"\0\1")
  with pytest.raises(FileNotFoundError, match="none among the 2 files"):
    load(tmp_path)


def test_unusable_tokenizers_raise_with_the_path(
  tmp_path, text_file, tokenizer_file
):
  with pytest.raises(FileNotFoundError, match="expected a JSON file"):
    load(text_file, tokenizer=str(tmp_path / "none.json"))
  with pytest.raises(ValueError, match="could not be read"):
    load(text_file, tokenizer=str(text_file))
  (tmp_path / "b.txt").write_text("three")
  with pytest.raises(ValueError, match="vocabulary size 4, got 4 in .*b.txt"):
    load(tmp_path / "b.txt", 4, tokenizer=str(tokenizer_file))


def test_ids_beyond_the_vocabulary_raise_with_id_and_file(tmp_path, text_file):
  with pytest.raises(
    ValueError, match="vocabulary size 100, got 117 in .*text"
  ):
    load(text_file, 100)
  ids = np.ones(2**20, np.uint32)
  ids[-1] = 2**31
  ids.tofile(tmp_path / "high.bin")
  with pytest.raises(ValueError, match="got 2147483648 in .*high.bin"):
    load(tmp_path / "high.bin", 9, dtype="uint32")


def test_wrong_ids_that_sampling_misses_raise_when_read(tmp_path):
  ids = np.ones(2**20, np.uint16)
  ids[5000:9000] = 300
  ids.tofile(tmp_path / "tokens.bin")
  tokens = load(tmp_path / "tokens.bin", dtype="uint16")
  with pytest.raises(ValueError, match="vocabulary size 256, got 300 in .*tok"):
    tokens.read(4096, 8192)


def test_token_files_of_another_dtype_are_rejected(tmp_path):
  (tmp_path / "odd.bin").write_bytes(b"12345")
  with pytest.raises(ValueError, match="multiple of 2 bytes, got 5"):
    load(tmp_path / "odd.bin", dtype="uint16")
  np.arange(1, 200, dtype=np.uint32).tofile(tmp_path / "wide.bin")
  with pytest.raises(ValueError, match="every other uint16.*pass dtype uint32"):
    load(tmp_path / "wide.bin", dtype="uint16")
  np.save(tmp_path / "long.npy", np.arange(200))
  with pytest.raises(ValueError, match="flat array of uint32, got int64"):
    load(tmp_path / "long.npy", dtype="uint32")
  (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\1\0")
  with pytest.raises(ValueError, match="cannot be read as one"):
    load(tmp_path / "cut.npy", dtype="uint32")
