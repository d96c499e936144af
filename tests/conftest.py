# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: CPU with eight devices, no silent rank promotion.

`make test-gpu` runs the tests that need a GPU, `make test-aot` those that only
compile for one; elsewhere they are skipped. Programs for the CPU are compiled
with `QUICK`, unless XLA_FLAGS says otherwise (`XLA_FLAGS= make test`: as users
compile them).
"""

import gc
import os
import platform
from importlib.util import find_spec

# Before JAX is imported: on a machine with a GPU the suite still means the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from benchmarks import aot

# Most of the suite's time would be the compiler's. These flags take away three
# quarters of it: each fused loop becomes machine code through XLA's older
# emitter and through LLVM without its optimizations. XLA's own passes, and so
# fusions, collectives and buffers, stay. Without FMA (AVX has none) a product
# and a sum are rounded twice in every program: which of them LLVM contracts to
# one rounding differs from emitter to emitter and from program to program.
# Commands that tests start inherit the flags.
QUICK = (
  "--xla_backend_optimization_level=0"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
  " --xla_cpu_max_isa=AVX"
)

if os.environ["JAX_PLATFORMS"] == "cpu":
  aot.only_compile()
  # Tracing makes many objects, of which few are garbage: run as often as by
  # default, the collector takes a fifteenth of the suite's time. On a GPU what
  # waits for it could hold the memory that the next test needs.
  gc.set_threshold(100_000)

# Not through XLA_FLAGS, which commands started by a test would inherit.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same few examples in every run; an example that compiles takes seconds.
hypothesis.settings.register_profile(
  "coat_jax", deadline=None, derandomize=True, max_examples=20
)
hypothesis.settings.load_profile("coat_jax")


# Compiled programs map memory, a few thousand mappings a file of tests, and a
# process may have 65530 of them (vm.max_map_count): the next one is a crash.
MAPPINGS = 30_000


def pytest_configure(config):
  # Before anything is compiled. The level would be that of what is compiled for
  # a GPU, too; CUDA may be there without a test for it.
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
  """Drops programs between files of tests, before there are too many."""
  if nextitem is not None and nextitem.path == item.path:
    return
  if platform.system() == "Linux" and _mappings() > MAPPINGS:
    jax.clear_caches()


def _mappings():
  with open("/proc/self/maps") as maps:
    return sum(1 for _ in maps)
