# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are found, however their files are damaged."""

import json
import os
import re
import shutil

import numpy as np
import pytest

from tests.matrices import quick
from tests.train.run.states import abstract_state, batches, bytes_of
from train.run import checkpoint, checksums


def damages(data):
  """Yields damaged versions of a file: other bytes, or None for no file."""
  rng = np.random.default_rng(len(data))
  for place in rng.integers(len(data), size=5):
    flipped = bytearray(data)
    flipped[place] ^= 1 << rng.integers(8)
    yield bytes(flipped)
  yield from (data[: len(data) * 2 // 3], b"", data + b"\0", None)


@pytest.mark.slow
def test_damage_of_any_file_selects_the_previous_checkpoint(
  copied,
):
  late = {"_CHECKPOINT_METADATA", "commit_success.txt"}
  folder = copied / "5"
  names = [
    file.relative_to(folder).as_posix()
    for file in folder.rglob("*")
    if file.is_file()
  ]
  kinds = {re.sub("[0-9a-f]{32}", "*", name) for name in names}
  for item in ("params", "optimizer"):
    for kind in ("manifest.ocdbt", "d/*", "ocdbt.process_0/d/*", "_METADATA"):
      assert f"{item}/{kind}" in kinds
  assert {"data/metadata", "run/metadata", "checksums.json"} | late < kinds
  assert checkpoint.newest_whole_step(copied) == (5, [])
  for name in set(names) - late:
    data = (folder / name).read_bytes()
    for damaged in damages(data):
      (folder / name).unlink()
      if damaged is not None:
        (folder / name).write_bytes(damaged)
      found, damages_found = checkpoint.newest_whole_step(copied)
      assert found == 3, name
      # If checksums.json is damaged, the report may name a file listed there.
      assert len(damages_found) == 1 and str(folder) in damages_found[0]
      assert name in damages_found[0] or name == checksums.NAME
    (folder / name).write_bytes(data)
  assert checkpoint.newest_whole_step(copied) == (5, [])


@pytest.mark.parametrize("text", ["{}", "[]", '["run/metadata"]', "null", "1"])
def test_checksums_without_files_count_as_damage(copied, text):
  (copied / "5" / checksums.NAME).write_text(text)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert found == 3
  assert damaged == [f"{copied / '5'}: checksums.json lists no files"]


def test_deeply_nested_checksums_count_as_damage(copied):
  (copied / "5" / checksums.NAME).write_text("[" * 300_000)
  found, damaged = checkpoint.newest_whole_step(copied)
  assert found == 3 and "checksums.json cannot be read" in damaged[0]


@pytest.mark.parametrize(
  "name",
  [
    *("/dev/zero", "../3/run/metadata", "run/../../3/run/metadata", "outside"),
    *("link", "fifo", "run", "a\0b", "/etc/hostname"),
  ],
)
def test_checksums_of_other_files_count_as_damage(copied, tmp_path, name):
  file = copied / "5" / checksums.NAME
  if name == "outside":
    name = str(tmp_path / name)
    shutil.copy(copied / "5" / "run" / "metadata", name)
  if name == "link":
    (copied / "5" / name).symlink_to(copied / "3" / "run" / "metadata")
  if name == "fifo":
    os.mkfifo(copied / "5" / name)
  digest = json.loads(file.read_text())["run/metadata"]
  for named in ({name: digest}, {"run/metadata": digest, name: digest}):
    file.write_text(json.dumps(named))
    found, damaged = checkpoint.newest_whole_step(copied)
    assert found == 3
    assert f"{name} is missing or is not a plain file in" in damaged[0]


@pytest.mark.parametrize(
  "name", ["checksums.json", "_CHECKPOINT_METADATA", "commit_success.txt"]
)
def test_link_to_a_device_is_not_read(copied, name):
  (copied / "5" / name).unlink()
  (copied / "5" / name).symlink_to("/dev/zero")
  found, damaged = checkpoint.newest_whole_step(copied)
  assert (
    found == 3 and f"{name} is missing or is not a plain file" in damaged[0]
  )


# Orbax itself reports damage of these files, but does not need them.
@pytest.mark.parametrize(
  "name", quick(0, ["_CHECKPOINT_METADATA", "commit_success.txt"])
)
def test_files_without_a_checksum_are_not_needed(saved, copied, name):
  for damaged in damages((copied / "5" / name).read_bytes()):
    (copied / "5" / name).unlink(missing_ok=True)
    if damaged is not None:
      (copied / "5" / name).write_bytes(damaged)
    assert checkpoint.newest_whole_step(copied) == (5, [])
    state = checkpoint.restore(copied, 5, abstract_state(""), batches())
    assert state.step == 5
    assert bytes_of(state)[1:] == bytes_of(saved[1])[1:]


def test_error_names_all_checkpoints_if_none_is_whole(copied):
  for number in (3, 5):
    (copied / str(number) / "run" / "metadata").write_text("{}")
  with pytest.raises(
    ValueError, match=r"5: run/metadata does not .*3: run/metadata does not"
  ):
    checkpoint.newest_whole_step(copied)
