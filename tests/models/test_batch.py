# SPDX-License-Identifier: Apache-2.0
"""Tests batches of packed documents: positions, targets and their weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.models import Batch
from coat_jax.models.batch import positions

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4]])
TOKENS = jnp.asarray(np.arange(16).reshape(2, 8), jnp.int32)


def test_positions_begin_at_0_in_each_document():
  want = [[0, 1, 2, 0, 1, 2, 0, 1], [*range(8)]]
  np.testing.assert_array_equal(positions(jnp.asarray(SEGMENTS)), want)
  assert positions(None) is None


def test_targets_within_documents_have_equal_shares():
  is_target = np.ones((2, 8), bool)
  is_target[0, 6:] = is_target[1, :5] = False  # Padding, and prompt tokens.
  batch = Batch.make(TOKENS, jnp.asarray(SEGMENTS), jnp.asarray(is_target))
  want = np.zeros((2, 8))
  for row in range(2):
    for i in range(1, 8):
      same = SEGMENTS[row, i] == SEGMENTS[row, i - 1]
      want[row, i] = same and is_target[row, i]
  assert want.sum() == 7
  np.testing.assert_allclose(batch.shares, want / 7, rtol=1e-6)
  assert batch.target_shares.shape == batch.targets.shape == (2, 7)
  np.testing.assert_array_equal(batch.targets, TOKENS[:, 1:])
  np.testing.assert_array_equal(batch.inputs, TOKENS[:, :-1])
  np.testing.assert_array_equal(batch.input_segments, SEGMENTS[:, :-1])


def test_batch_infers_targets_from_segments():
  want = Batch.make(TOKENS, jnp.asarray(SEGMENTS))
  got = Batch.of(Batch(TOKENS, jnp.asarray(SEGMENTS)))
  np.testing.assert_array_equal(got.shares, want.shares)
  assert got.shares[0, 3] == 0 < got.shares[0, 2]
  of_numpy = Batch.make(TOKENS, is_target=np.ones((2, 8), np.float32))
  np.testing.assert_allclose(of_numpy.shares[:, 1:], 1 / 14, rtol=1e-6)


@pytest.mark.parametrize(
  "batch, words",
  [
    (TOKENS[:, :1], r"T at least 1, got \(2, 1\)"),
    (TOKENS[0], r"got \(8,\)"),
    (Batch(TOKENS, jnp.asarray(SEGMENTS)[:, 1:]), r"segments .* got \(2, 7\)"),
    (Batch(TOKENS, shares=jnp.ones((2, 7))), r"shares .* got \(2, 7\)"),
  ],
)
def test_wrong_shapes_are_refused(batch, words):
  with pytest.raises(ValueError, match=words):
    Batch.of(batch)


def test_batch_without_targets_has_zero_shares():
  none = Batch.make(TOKENS, is_target=jnp.zeros((2, 8), bool))
  np.testing.assert_array_equal(none.shares, 0)


def test_plain_tokens_are_one_document_per_row():
  for batch in (Batch.of(TOKENS), Batch.make(TOKENS), Batch.of(Batch(TOKENS))):
    np.testing.assert_array_equal(batch.tokens, TOKENS)
    assert batch.segments is batch.target_shares is batch.input_segments is None
