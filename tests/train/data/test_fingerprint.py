# SPDX-License-Identifier: Apache-2.0
"""A fingerprint tells other data of the same length; it stays what it was."""

import hashlib

import numpy as np
import pytest

from train.data.batches import TokenSource

SIZE = 300_000


def fingerprint(ids):
  source = TokenSource(
    name="test", parts=[ids], vocab_size=2**16, held_out=0.05
  )
  return source.fingerprint()


@pytest.mark.parametrize("sample", [0, 31, 63])
def test_one_token_of_any_sample_changes_the_fingerprint(sample):
  ids = np.random.default_rng(0).integers(0, 2**16, SIZE, np.uint16)
  changed = ids.copy()
  # 64 samples of 4096 tokens, spread evenly from the first to the last token.
  changed[round(sample / 63 * (SIZE - 4096)) + 5] ^= 1
  assert fingerprint(changed) != fingerprint(ids) == fingerprint(ids.copy())


def test_fingerprint_is_the_hash_in_checkpoints_of_before():
  # Of a stream that is one sample: its length, then its ids as int32.
  ids = np.arange(1000, dtype=np.uint16)
  want = hashlib.sha256(b"1000" + ids.astype("<i4").tobytes()).hexdigest()
  assert fingerprint(ids) == want[:16]
