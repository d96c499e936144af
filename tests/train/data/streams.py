# SPDX-License-Identifier: Apache-2.0
"""A stream in which each token is its own position."""

import numpy as np

from train.data.tokens import TokenSource


def numbered(size, *, held_out=0.05, cuts=()):
  """Makes a stream whose tokens are their positions, split at `cuts`."""
  parts = np.split(np.arange(size, dtype=np.uint32), cuts)
  return TokenSource(
    name="test", parts=parts, vocab_size=size, held_out=held_out
  )
