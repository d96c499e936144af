# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation share no token, even if windows fill their parts."""

import itertools

import numpy as np
import pytest

from train.data import batches as data

SEQ_LEN = 16


def source(size, held_out):
  """Makes a stream in which each token is its own position."""
  parts = [np.arange(size, dtype=np.uint32)]
  return data.TokenSource(
    name="test", parts=parts, vocab_size=size, held_out=held_out
  )


# `start` is the first held-out token. 16 divides 320, but not 321 or 319.
@pytest.mark.parametrize(
  "size, held_out, start, windows",
  [
    (337, 0.05, 320, 19),
    (338, 0.05, 321, 20),
    (336, 0.05, 319, 19),
    (640, 0.5, 320, 19),
    # 50.05 tokens are rounded up to 51.
    (1001, 0.05, 950, 59),
  ],
)
def test_training_reads_no_held_out_token(size, held_out, start, windows):
  tokens = source(size, held_out)
  assert tokens.train_size(SEQ_LEN) == start
  batches = data.train_iterator(tokens, seq_len=SEQ_LEN, batch_size=1, seed=0)
  read = [next(batches)["tokens"][0] for _ in range(windows)]
  # One epoch reads each window once. The last token of a window is the first of
  # the next.
  assert max(rows.max() for rows in read) == windows * SEQ_LEN < start
  assert sorted(rows[0] for rows in read) == [
    SEQ_LEN * i for i in range(windows)
  ]
  again = [next(batches)["tokens"][0, 0] for _ in range(windows)]
  assert set(again) == {rows[0] for rows in read}


# With 642 tokens, window 20 ends with the last token. With 640 tokens, it would
# end one token after the last.
@pytest.mark.parametrize("size, windows", [(640, 19), (642, 20)])
def test_evaluation_reads_whole_windows_of_the_held_out_tokens(size, windows):
  tokens = source(size, 0.5)
  start = size // 2
  _, rows = data.split_windows(tokens, SEQ_LEN)
  held_out = data.held_out_batches(rows, batch_size=1)
  read = [batch["tokens"][0] for batch in itertools.islice(held_out, 99)]
  assert [rows[0] for rows in read] == [
    start + SEQ_LEN * i for i in range(windows)
  ]
  assert all(len(rows) == SEQ_LEN + 1 for rows in read)
