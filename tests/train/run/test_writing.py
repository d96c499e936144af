# SPDX-License-Identifier: Apache-2.0
"""A tree is written completely, or not at all and with a one-line error."""

import resource

import numpy as np
import orbax.checkpoint as ocp
import pytest

from train.run import writing
from train.run.writing import SaveError, check_out, write_tree

TREE = {"params": {"w": np.random.default_rng(0).normal(size=(100, 100))}}


def test_tree_is_written_into_new_folders(tmp_path):
  write_tree(tmp_path / "new" / "tree", TREE)
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(tmp_path / "new" / "tree")
  np.testing.assert_array_equal(tree["params"]["w"], TREE["params"]["w"])
  assert [path.name for path in (tmp_path / "new").iterdir()] == ["tree"]


def test_failed_write_leaves_no_files_and_no_traceback(tmp_path, capfd):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # The limit is enough for Orbax's index files and pytest's output, but not for
  # the array.
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    with pytest.raises(SaveError, match="could not write .*tree: .* too large"):
      write_tree(tmp_path / "tree", TREE)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert capfd.readouterr() == ("", "")
  assert not any(tmp_path.iterdir())


def test_error_names_a_file_where_a_folder_should_be(tmp_path):
  (tmp_path / "file").write_text("mine")
  with pytest.raises(SaveError, match="could not write .*sub: .*file"):
    write_tree(tmp_path / "file" / "sub", TREE)


def test_output_in_a_read_only_folder_is_refused(tmp_path, monkeypatch):
  # Root may write to a folder whose mode says read-only.
  monkeypatch.setattr(writing.os, "access", lambda path, mode: False)
  with pytest.raises(ValueError, match="which is read-only; pass another path"):
    check_out("plot", tmp_path / "new" / "plot.png")
