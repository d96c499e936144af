# SPDX-License-Identifier: Apache-2.0
"""Runs the Python of pages as a reader would."""

import jax
import pytest


@pytest.fixture
def as_a_reader(tmp_path, monkeypatch):
  """Runs a test in an empty folder, with most of JAX's defaults.

  Fewer compiler optimizations halve the time to compile.
  """
  monkeypatch.chdir(tmp_path)
  option = "jax_disable_most_optimizations"
  before = jax.config.read(option)
  jax.config.update(option, True)
  with jax.numpy_rank_promotion("allow"):
    yield
  jax.config.update(option, before)
