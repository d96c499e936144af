# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: CPU with eight devices, no silent rank promotion.

`make test-gpu` runs the tests that need a GPU, `make test-aot` those that only
compile for one; elsewhere they are skipped.
"""

import os

# Before JAX is imported: on a machine with a GPU the suite still means the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from benchmarks import aot

if os.environ["JAX_PLATFORMS"] == "cpu":
  aot.only_compile()

# Not through XLA_FLAGS, which commands started by a test would inherit.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same few examples in every run; an example that compiles takes seconds.
hypothesis.settings.register_profile(
  "coat_jax", deadline=None, derandomize=True, max_examples=20
)
hypothesis.settings.load_profile("coat_jax")


def pytest_runtest_setup(item):
  if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU")
  if item.get_closest_marker("aot") and not aot.available():
    pytest.skip("needs the compiler for CUDA; make test-aot installs it")
