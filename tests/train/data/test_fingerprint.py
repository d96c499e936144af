# SPDX-License-Identifier: Apache-2.0
"""Tests that fingerprints detect most changes of the data, but not all."""

import hashlib
import os

import numpy as np
import pytest

from train.data import token_files as fingerprint
from train.data.tokens import DataConfig, TokenSource, load_tokens

SIZE = 300_000
IDS = np.random.default_rng(0).integers(0, 2**16, SIZE, np.uint16)


def source(*parts):
  return TokenSource(name="test", parts=parts, vocab_size=2**16, held_out=0.05)


def files(folder, *parts):
  for i, part in enumerate(parts):
    part.tofile(folder / f"{i}.bin")
  return load_tokens(DataConfig(path=str(folder), dtype="uint16"), 2**16)


@pytest.fixture
def few_blocks(monkeypatch):
  """Uses 20 blocks of 100 ids instead of 4096 blocks of 64 KiB."""
  monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 200)
  monkeypatch.setattr(fingerprint, "_BLOCKS", 20)


def test_fingerprint_hashes_length_and_all_tokens():
  want = hashlib.sha256(f"[{SIZE}]".encode() + IDS.astype("<u2").tobytes())
  assert source(IDS).fingerprint == f"2:{want.hexdigest()[:32]}"


# These places are both ends and two places in between.
@pytest.mark.parametrize("place", [0, 4500, SIZE // 2, SIZE - 1])
def test_changing_any_token_in_memory_changes_the_fingerprint(place):
  changed = IDS.copy()
  changed[place] ^= 1
  assert source(changed).fingerprint != source(IDS).fingerprint
  assert source(IDS).change_times is None


@pytest.mark.parametrize("place", [0, 4500, SIZE // 2, SIZE - 1])
def test_changing_any_token_of_small_files_changes_the_fingerprint(
  tmp_path, place
):
  tokens = files(tmp_path, IDS[:70_001], IDS[70_001:])
  assert tokens.fingerprint == source(IDS).fingerprint
  assert tokens.change_times is None
  changed = IDS.copy()
  changed[place] ^= 1
  tokens = files(tmp_path, changed[:70_001], changed[70_001:])
  assert tokens.fingerprint != source(IDS).fingerprint


def test_replacing_three_quarters_of_the_tokens_changes_the_fingerprint(
  tmp_path, few_blocks
):
  before = files(tmp_path, IDS).fingerprint
  changed = np.zeros_like(IDS)
  for start in np.linspace(0, SIZE - 4096, 16).astype(int):
    changed[start : start + 4096] = IDS[start : start + 4096]
  assert files(tmp_path, changed).fingerprint != before


def test_change_longer_than_the_gap_between_blocks_is_always_detected(
  tmp_path, few_blocks
):
  before = files(tmp_path, IDS).fingerprint
  for start in np.random.default_rng(1).integers(0, SIZE * 19 // 20, 50):
    changed = IDS.copy()
    changed[start : start + SIZE // 20 + 1] ^= 1
    assert files(tmp_path, changed).fingerprint != before


def test_changes_at_file_ends_and_of_file_order_are_detected(
  tmp_path, few_blocks
):
  parts = np.split(IDS, [100_000, 100_300, 100_900])
  before = files(tmp_path, *parts).fingerprint
  for part in parts:
    for place in (0, 99, len(part) - 100, len(part) - 1):
      part[place] ^= 1
      assert files(tmp_path, *parts).fingerprint != before
      part[place] ^= 1
  assert files(tmp_path, *parts).fingerprint == before
  parts[1], parts[2] = parts[2], parts[1]
  assert files(tmp_path, *parts).fingerprint != before


def test_short_change_between_blocks_changes_only_the_file_times(
  tmp_path, few_blocks
):
  tokens = files(tmp_path, IDS)
  before, times = tokens.fingerprint, tokens.change_times
  changed = IDS.copy()
  changed[101] ^= 1
  tokens = files(tmp_path, changed)
  os.utime(tmp_path / "0.bin", ns=(0, 1))
  assert tokens.fingerprint == before
  assert None not in (times, tokens.change_times)
  assert tokens.change_times != times
