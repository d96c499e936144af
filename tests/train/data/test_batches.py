# SPDX-License-Identifier: Apache-2.0
"""Tests that batches are deterministic, split by process, and resumable."""

import functools
import itertools

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.streams import numbered
from train.data.batches import (
  held_out_batches,
  read_ahead,
  split_windows,
  train_batches,
  train_iterator,
)
from train.data.tokens import DataConfig, load_tokens

SEQ_LEN, BATCH = 16, 4


def take(iterator, count):
  return [batch["tokens"] for batch in itertools.islice(iterator, count)]


def batches(tokens, count, *, seed=0, **kwargs):
  rows, _ = split_windows(tokens, SEQ_LEN)
  found = train_batches(rows, batch_size=BATCH, seed=seed, **kwargs)
  return take(read_ahead(found), count)


def held_out(tokens, batch_size=BATCH, **kwargs):
  _, rows = split_windows(tokens, SEQ_LEN)
  return held_out_batches(rows, batch_size=batch_size, **kwargs)


def test_a_token_file_larger_than_memory_yields_batches(tmp_path):
  path = tmp_path / "sparse.bin"
  with path.open("wb") as file:
    file.truncate(2**38)  # A sparse file uses no disk space.
  config = DataConfig(path=str(path), dtype="uint16", held_out=1e-6)
  tokens = load_tokens(config, 256)
  assert len(tokens) == 2**37
  assert batches(tokens, 2)[1].shape == (BATCH, SEQ_LEN + 1)


def test_seed_determines_the_batches(embedded):
  first, again = batches(embedded, 5), batches(embedded, 5)
  other = batches(embedded, 5, seed=1)
  assert first[0].dtype == np.int32
  np.testing.assert_array_equal(first, again)
  assert all((a != b).any() for a, b in zip(first, other, strict=True))


def test_batch_size_does_not_change_the_order_of_sequences(embedded):
  read = functools.partial(train_iterator, seq_len=SEQ_LEN, seed=0)
  ones = take(read(embedded, batch_size=1), 2 * BATCH)
  whole = take(read(embedded, batch_size=BATCH), 2)
  np.testing.assert_array_equal(np.concatenate(ones), np.concatenate(whole))


@given(
  size=st.integers(300, 3000),
  held_out=st.floats(0.05, 0.5),
  seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_visits_each_window_once_and_no_held_out_token(
  size, held_out, seed
):
  tokens = numbered(size, held_out=held_out)
  stop = tokens.train_size(SEQ_LEN)
  windows = (stop - 1) // SEQ_LEN
  # Read BATCH whole epochs, so that each window occurs BATCH times.
  rows = np.concatenate(batches(tokens, windows, seed=seed))
  np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(SEQ_LEN + 1))
  starts, counts = np.unique(rows[:, 0], return_counts=True)
  np.testing.assert_array_equal(starts, np.arange(windows) * SEQ_LEN)
  assert (counts == BATCH).all()
  assert rows.max() < stop

  _, others = split_windows(tokens, SEQ_LEN)
  held = take(held_out_batches(others, batch_size=1), windows)
  assert np.min(held) == stop


def test_epochs_differ_in_order():
  tokens = numbered(400)
  count = (tokens.train_size(SEQ_LEN) - 1) // SEQ_LEN // BATCH * BATCH
  tokens = numbered(count * SEQ_LEN + 2 + SEQ_LEN, held_out=0.01)
  rows = np.concatenate(batches(tokens, 2 * count // BATCH))[:, 0]
  assert (rows[:count] != rows[count:]).any()
  np.testing.assert_array_equal(np.sort(rows[:count]), np.sort(rows[count:]))


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_the_rows_of_each_batch(embedded, process_count):
  shards = [
    batches(embedded, 3, process_index=index, process_count=process_count)
    for index in range(process_count)
  ]
  whole = [np.concatenate(rows) for rows in zip(*shards, strict=True)]
  np.testing.assert_array_equal(whole, batches(embedded, 3))


def test_held_out_batches_repeat_and_cover_the_held_out_share():
  tokens = numbered(2000, held_out=0.5)
  read = held_out(tokens, max_batches=2)
  first, again = take(read, 9), take(read, 9)
  assert len(first) == 2
  np.testing.assert_array_equal(first, again)
  starts = np.concatenate(first)[:, 0]
  assert starts[0] == 1000 and starts[-1] > 1800
  whole = take(held_out(tokens), 99)
  assert len(whole) == 999 // SEQ_LEN // BATCH


@pytest.mark.parametrize("is_mapped", [False, True])
def test_iterator_restored_by_orbax_continues_with_the_same_batches(
  tmp_path, embedded, is_mapped
):
  tokens = embedded
  if is_mapped:
    path = tmp_path / "tokens.bin"
    np.arange(20000, dtype=np.uint16).tofile(path)
    config = DataConfig(path=str(path), dtype="uint16")
    tokens = load_tokens(config, 20000)
  kwargs = dict(seq_len=SEQ_LEN, batch_size=BATCH, seed=3)
  iterator = train_iterator(tokens, **kwargs)
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
    want = take(iterator, 5)  # Reading continues during the save.

  fresh = train_iterator(tokens, **kwargs)
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


def test_invalid_sizes_seeds_and_process_numbers_are_refused():
  def train(size=1000, **kwargs):
    options = dict(seq_len=SEQ_LEN, batch_size=BATCH, seed=0) | kwargs
    return train_iterator(numbered(size), **options)

  def evaluate(size=1000, **kwargs):
    return held_out(numbered(size), **kwargs)

  def split(**kwargs):
    rows, _ = split_windows(numbered(1000), SEQ_LEN)
    return train_batches(rows, batch_size=BATCH, seed=0, **kwargs)

  for call, words in [
    (lambda: train(30), "at least 17 tokens each, got 30 tokens altogether"),
    (lambda: evaluate(10), "at least 17 tokens each, got 10 tokens altogether"),
    (lambda: train(batch_size=99), "at least 99 rows, .* got 59"),
    (
      lambda: evaluate(),
      "at least 4 rows must be held out, got 3; raise held_out",
    ),
    (lambda: train(seq_len=0), "seq_len must be at least 1, got 0"),
    (lambda: train(seed=-1), "seed must be at least 0"),
    (lambda: train(batch_size=0), "positive multiple"),
    (
      lambda: split(process_count=3),
      "multiple of 3, the number of processes, got 4",
    ),
    (lambda: split(process_index=1), "below 1, got 1"),
    (lambda: evaluate(4000, max_batches=0), "max_batches must be at least 1"),
  ]:
    with pytest.raises(ValueError, match=words):
      call()
