# SPDX-License-Identifier: Apache-2.0
"""Names a GPU or TPUs to compile for, on a command line."""

import argparse
from collections.abc import Callable

import jax

from benchmarks import aot, tpu


def parse(text: str) -> str:
  """Reads the name of a GPU, or of a topology of TPUs such as v6e:2x2."""
  if text in aot.GPUS or ":" in text:
    return text
  raise argparse.ArgumentTypeError(
    f"must be one of {', '.join(aot.GPUS)} or a topology of TPUs such as "
    f"v6e:2x2, got {text!r}"
  )


def device_kind(target: str) -> str:
  """Returns what JAX calls the devices of a target."""
  if target in aot.GPUS:
    return aot.devices(target, 1)[0].device_kind
  return tpu.devices(target)[0].device_kind


def compile_for(target: str, fn: Callable, *specs) -> jax.stages.Compiled:
  """Compiles `fn`, whose arguments are like `specs`, for one device."""
  if target in aot.GPUS:
    return aot.compile_for(target, fn, *specs)
  return tpu.compile_for_tpu(target, fn, *specs)
