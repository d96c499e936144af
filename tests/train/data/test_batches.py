# SPDX-License-Identifier: Apache-2.0
"""Data: deterministic, sharded by process, resumable, clear about faults."""

import functools
import itertools

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from train.data import batches as data
from train.data import sources

SEQ_LEN, BATCH = 16, 4


def take(iterator, count):
  return [batch["tokens"] for batch in itertools.islice(iterator, count)]


def source(size, *, held_out=0.05, cuts=()):
  """A stream in which each token is its own position, in several parts."""
  parts = np.split(np.arange(size, dtype=np.uint32), cuts)
  return data.TokenSource(
    name="test", parts=parts, vocab_size=size, held_out=held_out
  )


def batches(tokens, count, *, seed=0, **kwargs):
  iterator = data.train_iterator(
    tokens, seq_len=SEQ_LEN, batch_size=BATCH, seed=seed, **kwargs
  )
  return take(iterator, count)


@pytest.fixture(scope="module")
def embedded():
  return data.load_tokens(data.DataConfig(), 256)


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


# --- the stream ---------------------------------------------------------------


def test_embedded_default_is_python_source_as_bytes(embedded):
  assert len(embedded) > 2**20
  assert b"import" in embedded.read(0, 2**16).astype(np.uint8).tobytes()


def test_reading_across_parts_is_reading_the_whole():
  tokens = source(1000, cuts=[1, 17, 500, 501])
  for start, stop in [(0, 1000), (0, 1), (16, 18), (499, 502), (7, 7)]:
    np.testing.assert_array_equal(
      tokens.read(start, stop), np.arange(start, stop)
    )


def test_fingerprint_tells_streams_apart():
  assert source(1000).fingerprint() == source(1000, cuts=[9]).fingerprint()
  assert source(1000).fingerprint() != source(1001).fingerprint()


def test_folder_and_glob_read_sorted_text_and_pass_over_the_rest(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / "deep" / "b.txt").write_bytes(b"second")
  (tmp_path / "a.md").write_bytes(b"first ")
  (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
  (tmp_path / ".hidden").write_bytes(b"no")
  for path, want in [
    (tmp_path, b"first second"),
    (tmp_path / "**" / "*.txt", b"second"),
  ]:
    tokens = data.load_tokens(data.DataConfig(path=str(path)), 256)
    assert tokens.read(0, len(tokens)).astype(np.uint8).tobytes() == want


def test_tokenizer_ends_each_document(tmp_path, tokenizer_file):
  (tmp_path / "a.txt").write_text("one two\n")
  (tmp_path / "b.txt").write_text("three one\n")
  config = data.DataConfig(
    path=str(tmp_path / "*.txt"), tokenizer=str(tokenizer_file)
  )
  tokens = data.load_tokens(config, 5)
  assert tokens.read(0, len(tokens)).tolist() == [2, 3, 1, 4, 2, 1]


def test_long_documents_are_cut_at_line_ends(
  tmp_path, tokenizer_file, monkeypatch
):
  (tmp_path / "a.txt").write_text("one two\n" * 50 + "three" * 9)
  config = data.DataConfig(
    path=str(tmp_path / "a.txt"), tokenizer=str(tokenizer_file)
  )
  whole = data.load_tokens(config, 5)
  monkeypatch.setattr(sources, "_PIECE", 60)
  cut = data.load_tokens(config, 5)
  np.testing.assert_array_equal(whole.read(0, 102), cut.read(0, 102))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("has_header", [False, True])
def test_token_files_are_mapped_with_and_without_header(
  tmp_path, dtype, has_header
):
  ids = np.arange(5000, dtype=dtype)
  for name, part in [("a.npy", ids[:3000]), ("b.npy", ids[3000:])]:
    if has_header:
      np.save(tmp_path / name, part)
    else:
      part.tofile(tmp_path / name)
  config = data.DataConfig(path=str(tmp_path), dtype=dtype)
  tokens = data.load_tokens(config, 5000)
  assert not tokens.is_in_memory
  assert isinstance(tokens.parts[0][:1], np.memmap)
  np.testing.assert_array_equal(tokens.read(0, 5000), ids)


def test_a_file_larger_than_memory_opens_and_trains(tmp_path):
  path = tmp_path / "sparse.bin"
  with path.open("wb") as file:
    file.truncate(2**38)  # Sparse: takes no room on the disk.
  config = data.DataConfig(path=str(path), dtype="uint16", held_out=1e-6)
  tokens = data.load_tokens(config, 256)
  assert len(tokens) == 2**37
  assert batches(tokens, 2)[1].shape == (BATCH, SEQ_LEN + 1)


# --- batches ------------------------------------------------------------------


def test_batches_repeat_with_the_seed_and_differ_between_seeds(embedded):
  first, again = batches(embedded, 5), batches(embedded, 5)
  other = batches(embedded, 5, seed=1)
  assert first[0].dtype == np.int32
  np.testing.assert_array_equal(first, again)
  assert all((a != b).any() for a, b in zip(first, other, strict=True))


def test_a_batch_may_be_one_sequence(embedded):
  read = functools.partial(data.train_iterator, seq_len=SEQ_LEN, seed=0)
  ones = take(read(embedded, batch_size=1), 2 * BATCH)
  whole = take(read(embedded, batch_size=BATCH), 2)
  np.testing.assert_array_equal(np.concatenate(ones), np.concatenate(whole))


@given(
  size=st.integers(300, 3000),
  held_out=st.floats(0.05, 0.5),
  seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_visits_each_window_once_and_nothing_held_out(
  size, held_out, seed
):
  tokens = source(size, held_out=held_out)
  stop = tokens.train_size(SEQ_LEN)
  windows = (stop - 1) // SEQ_LEN
  # As many batches as make whole epochs: each window is seen BATCH times.
  rows = np.concatenate(batches(tokens, windows, seed=seed))
  np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(SEQ_LEN + 1))
  starts, counts = np.unique(rows[:, 0], return_counts=True)
  np.testing.assert_array_equal(starts, np.arange(windows) * SEQ_LEN)
  assert (counts == BATCH).all()
  assert rows.max() < stop

  held = take(data.eval_batches(tokens, seq_len=SEQ_LEN, batch_size=1), windows)
  assert np.min(held) == stop


def test_each_epoch_has_another_order():
  tokens = source(400)
  count = (tokens.train_size(SEQ_LEN) - 1) // SEQ_LEN // BATCH * BATCH
  tokens = source(count * SEQ_LEN + 2 + SEQ_LEN, held_out=0.01)
  rows = np.concatenate(batches(tokens, 2 * count // BATCH))[:, 0]
  assert (rows[:count] != rows[count:]).any()
  np.testing.assert_array_equal(np.sort(rows[:count]), np.sort(rows[count:]))


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_read_disjoint_rows_of_the_same_batch(
  embedded, process_count
):
  shards = [
    batches(embedded, 3, process_index=index, process_count=process_count)
    for index in range(process_count)
  ]
  whole = [np.concatenate(rows) for rows in zip(*shards, strict=True)]
  np.testing.assert_array_equal(whole, batches(embedded, 3))


def test_eval_batches_repeat_and_spread_over_the_held_out_share():
  tokens = source(2000, held_out=0.5)
  read = data.eval_batches(
    tokens, seq_len=SEQ_LEN, batch_size=BATCH, max_batches=2
  )
  first, again = take(read, 9), take(read, 9)
  assert len(first) == 2
  np.testing.assert_array_equal(first, again)
  starts = np.concatenate(first)[:, 0]
  assert starts[0] == 1000 and starts[-1] > 1800
  whole = take(data.eval_batches(tokens, seq_len=SEQ_LEN, batch_size=BATCH), 99)
  assert len(whole) == 999 // SEQ_LEN // BATCH


@pytest.mark.parametrize("is_mapped", [False, True])
def test_iterator_resumes_bit_equal_through_orbax(
  tmp_path, embedded, is_mapped
):
  tokens = embedded
  if is_mapped:
    path = tmp_path / "tokens.bin"
    np.arange(20000, dtype=np.uint16).tofile(path)
    config = data.DataConfig(path=str(path), dtype="uint16")
    tokens = data.load_tokens(config, 20000)
  kwargs = dict(seq_len=SEQ_LEN, batch_size=BATCH, seed=3)
  iterator = data.train_iterator(tokens, **kwargs)
  take(iterator, 7)
  weights = {"w": jax.numpy.ones(3)}
  with ocp.CheckpointManager(tmp_path / "run") as manager:
    manager.save(
      7,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(weights),
        data=grain.checkpoint.CheckpointSave(iterator),
      ),
    )
    want = take(iterator, 5)  # Goes on while the save is under way.

  fresh = data.train_iterator(tokens, **kwargs)
  with ocp.CheckpointManager(tmp_path / "run") as manager:
    manager.restore(
      7,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(
          jax.eval_shape(lambda: weights),
        ),
        data=grain.checkpoint.CheckpointRestore(fresh),
      ),
    )
  np.testing.assert_array_equal(take(fresh, 5), want)


# --- faults -------------------------------------------------------------------


def load(path, vocab_size=256, **kwargs):
  return data.load_tokens(data.DataConfig(path=str(path), **kwargs), vocab_size)


def test_config_refuses_options_that_exclude_each_other():
  for kwargs, words in [
    (dict(held_out=0.0), "held_out must be a share"),
    (dict(held_out=1.0), "held_out must be a share"),
    (dict(dtype="int64", path="x"), "dtype must be"),
    (dict(dtype="uint16"), "needs a path"),
    (dict(dtype="uint16", path="x", tokenizer="t.json"), "applies to text"),
  ]:
    with pytest.raises(ValueError, match=words):
      data.DataConfig(**kwargs)


def test_missing_and_empty_data_are_named(tmp_path):
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


def test_binary_files_are_not_text(tmp_path):
  (tmp_path / "a.bin").write_bytes(b"\0\1")
  with pytest.raises(ValueError, match="pass dtype uint16 or uint32"):
    load(tmp_path / "a.bin")
  (tmp_path / "b.bin").write_bytes(b"\0\1")
  with pytest.raises(FileNotFoundError, match="none among the 2 files"):
    load(tmp_path)


def test_tokenizer_faults_are_named(tmp_path, text_file, tokenizer_file):
  with pytest.raises(FileNotFoundError, match="tokenizer must be a JSON file"):
    load(text_file, tokenizer=str(tmp_path / "none.json"))
  with pytest.raises(ValueError, match="cannot be read"):
    load(text_file, tokenizer=str(text_file))
  (tmp_path / "b.txt").write_text("three")
  with pytest.raises(ValueError, match="vocabulary of 4, got 4 in .*b.txt"):
    load(tmp_path / "b.txt", 4, tokenizer=str(tokenizer_file))


def test_ids_beyond_the_vocabulary_name_id_file_and_vocabulary(
  tmp_path, text_file
):
  with pytest.raises(ValueError, match="vocabulary of 100, got 117 in .*text"):
    load(text_file, 100)
  ids = np.ones(2**20, np.uint32)
  ids[-1] = 2**31
  ids.tofile(tmp_path / "high.bin")
  with pytest.raises(ValueError, match="got 2147483648 in .*high.bin"):
    load(tmp_path / "high.bin", 9, dtype="uint32")


def test_wrong_ids_between_the_samples_are_found_when_read(tmp_path):
  ids = np.ones(2**20, np.uint16)
  ids[5000:9000] = 300
  ids.tofile(tmp_path / "tokens.bin")
  tokens = load(tmp_path / "tokens.bin", dtype="uint16")
  with pytest.raises(ValueError, match="vocabulary of 256, got 300 in .*tok"):
    batches(tokens, 2**16 // BATCH)


def test_token_files_of_another_type_are_refused(tmp_path):
  (tmp_path / "odd.bin").write_bytes(b"12345")
  with pytest.raises(ValueError, match="multiple of 2 bytes, got 5"):
    load(tmp_path / "odd.bin", dtype="uint16")
  np.arange(1, 200, dtype=np.uint32).tofile(tmp_path / "wide.bin")
  with pytest.raises(ValueError, match="every other place.*pass dtype uint32"):
    load(tmp_path / "wide.bin", dtype="uint16")
  np.save(tmp_path / "long.npy", np.arange(200))
  with pytest.raises(ValueError, match="flat array of uint32, got int64"):
    load(tmp_path / "long.npy", dtype="uint32")
  (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\1\0")
  with pytest.raises(ValueError, match="cannot be read as one"):
    load(tmp_path / "cut.npy", dtype="uint32")


def test_sizes_that_do_not_fit_are_named():
  def train(size=1000, **kwargs):
    options = dict(seq_len=SEQ_LEN, batch_size=BATCH, seed=0) | kwargs
    return data.train_iterator(source(size), **options)

  def evaluate(size=1000, **kwargs):
    options = dict(seq_len=SEQ_LEN, batch_size=BATCH) | kwargs
    return data.eval_batches(source(size), **options)

  for call, words in [
    (lambda: train(30), "sequence of 16 . 1 tokens, got 30 tokens in all"),
    (lambda: evaluate(10), "sequence of 16 . 1 tokens, got 10 tokens in all"),
    (lambda: train(batch_size=99), "needs 99 windows of 16 tokens, got 59"),
    (lambda: evaluate(), "needs 4 windows .* got 3 .* raise held_out"),
    (lambda: train(seq_len=0), "seq_len must be at least 1, got 0"),
    (lambda: train(seed=-1), "seed must be at least 0"),
    (lambda: train(batch_size=0), "positive multiple"),
    (lambda: train(process_count=3), "multiple of the 3 processes, got 4"),
    (lambda: train(process_index=1), "below 1, got 1"),
    (lambda: evaluate(max_batches=0), "max_batches must be at least 1"),
  ]:
    with pytest.raises(ValueError, match=words):
      call()
