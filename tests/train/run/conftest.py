# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, saved once for all tests."""

import shutil

import pytest

from tests.train.run.states import abstract_state, random_state, save


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
  """Returns a folder of two checkpoints and their state; tests use copies."""
  path = tmp_path_factory.mktemp("checkpoints")
  state = random_state(abstract_state(""))
  for number in (3, 5):
    save(path, state, step=number)
  return path, state


@pytest.fixture
def copied(saved, tmp_path):
  return shutil.copytree(saved[0], tmp_path / "checkpoints")
