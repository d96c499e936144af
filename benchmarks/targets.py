# SPDX-License-Identifier: Apache-2.0
"""Compiles functions for the GPU or TPU given on the command line."""

import argparse
from collections.abc import Callable

import jax

from benchmarks import aot, tpu


def parse(text: str) -> str:
  """Parses a target: the name of a GPU, or a TPU topology such as v6e:2x2."""
  if text in aot.GPUS or ":" in text:
    return text
  raise argparse.ArgumentTypeError(
    f"must be one of {', '.join(aot.GPUS)} or a TPU topology such as v6e:2x2, "
    f"got {text!r}"
  )


def device_kind(target: str) -> str:
  """Returns JAX's name for the devices of a target."""
  if target in aot.GPUS:
    return aot.devices(target, 1)[0].device_kind
  return tpu.devices(target)[0].device_kind


def compile_for(target: str, fn: Callable, *specs) -> jax.stages.Compiled:
  """Compiles `fn` for one device of a target."""
  if target in aot.GPUS:
    return aot.compile_for(target, fn, *specs)
  return tpu.compile_for_tpu(target, fn, *specs)
