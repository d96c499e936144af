# SPDX-License-Identifier: Apache-2.0
"""Configures all tests: eight CPU devices, and no silent rank promotion.

Tests that need a GPU are skipped except in `make test-gpu`, and tests that
compile for a GPU except in `make test-aot`. Programs for the CPU are compiled
with the XLA flags `QUICK`, unless XLA_FLAGS is set. `XLA_FLAGS= make test`
compiles them as users do.
"""

import gc
import os
import platform
from importlib.util import find_spec

# Set this before importing JAX. Tests run on the CPU even if there is a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from benchmarks import aot

# By default, most of the tests' time is spent compiling. These flags save three
# quarters of that: fused loops are compiled by XLA's older emitter, and by LLVM
# without optimizations. XLA's own passes still run, so fusions, collectives and
# buffers are the same. AVX has no FMA, so LLVM always rounds a * b + c twice;
# with FMA, it would sometimes round only once, depending on the emitter and the
# program. Commands that tests start inherit the flags.
QUICK = (
  "--xla_backend_optimization_level=0"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
  " --xla_cpu_max_isa=AVX"
)

if os.environ["JAX_PLATFORMS"] == "cpu":
  aot.only_compile()
  # Tracing makes many objects, few of which are garbage, so by default the
  # garbage collector takes a fifteenth of the tests' time. Don't change this on
  # a GPU, where uncollected objects could hold memory that the next test needs.
  gc.set_threshold(100_000)

# Don't use XLA_FLAGS for this: commands that tests start would inherit it.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Use the same few examples in every run, because compiling one takes seconds.
hypothesis.settings.register_profile(
  "coat_jax", deadline=None, derandomize=True, max_examples=20
)
hypothesis.settings.load_profile("coat_jax")


# Compiled programs map memory, a few thousand mappings per test file. A process
# that needs more than 65530 mappings (vm.max_map_count) crashes.
MAPPINGS = 30_000


def pytest_configure(config):
  # Set the flags before anything is compiled, but not if tests compile for a
  # GPU, because they would change those programs too. The CUDA compiler may be
  # installed although no such test is selected.
  is_for_gpu = aot.available() and "not aot" not in config.option.markexpr
  is_x86 = platform.machine() in ("x86_64", "AMD64")
  if os.environ["JAX_PLATFORMS"] == "cpu" and is_x86 and not is_for_gpu:
    os.environ.setdefault("XLA_FLAGS", QUICK)


def pytest_runtest_setup(item):
  if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU")
  if item.get_closest_marker("aot") and not aot.available():
    pytest.skip("needs the compiler for CUDA; make test-aot installs it")
  if item.get_closest_marker("tpu") and find_spec("libtpu") is None:
    pytest.skip("needs the compiler for TPUs; make test-tpu installs it")


def pytest_runtest_teardown(item, nextitem):
  """Drops compiled programs if they use too many of Linux's memory mappings."""
  if nextitem is not None and nextitem.path == item.path:
    return
  if platform.system() == "Linux" and _mappings() > MAPPINGS:
    jax.clear_caches()


def _mappings():
  with open("/proc/self/maps") as maps:
    return sum(1 for _ in maps)
