# SPDX-License-Identifier: Apache-2.0
"""Helpers that lower kernels, expect their errors, and compare codes."""

import inspect

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from coat_jax.ops.types import Unsupported
from tests import oracles

needs_interpreter = pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="this JAX has no interpreter for Mosaic GPU",
)


def for_h200():
  """Returns a context in which JAX traces for an H200, on any machine."""
  device = AbstractDevice("NVIDIA H200", 132, "cuda")
  return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered_for_h200(fn, *args) -> str:
  """Lowers `fn` for an H200, on any machine."""
  with for_h200():
    traced = jax.jit(fn).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def with_tile(monkeypatch, kernel, name: str, tile):
  """Makes function `name` of the kernel's module pick `tile`.

  Returns the kernel without its jit, which might reuse a compilation with
  another tile.
  """
  inner = inspect.unwrap(kernel)
  monkeypatch.setitem(inner.__globals__, name, lambda *_: tile)
  return inner


def refused(reason: str):
  """Expects a kernel to refuse its arguments; `reason` is a regex."""
  return pytest.raises(Unsupported, match=reason)


def code_bits(codes) -> np.ndarray:
  """Returns FP8 codes as uint8, with 0xFF for every NaN."""
  bits = np.asarray(codes).view(np.uint8)
  return np.where(np.isnan(np.asarray(codes, np.float32)), 0xFF, bits)


def assert_same_codes(actual, expected, share: float = 1.0):
  """Checks that at least this share of codes is equal.

  The other codes may be one code apart. NaN must be in the same places.
  """
  assert actual.dtype == expected.dtype and actual.shape == expected.shape
  actual, expected = code_bits(actual), code_bits(expected)
  if share == 1:
    np.testing.assert_array_equal(actual, expected)
  np.testing.assert_array_equal(actual == 0xFF, expected == 0xFF)
  finite = expected != 0xFF
  apart = oracles.codes_apart(actual[finite], expected[finite])
  assert np.max(apart, initial=0) <= 1
  equal = np.mean(apart == 0)
  assert equal >= share, f"only {equal:.5%} of {apart.size} codes are equal"


def assert_same_operand(actual, expected, share: float = 1.0):
  """Checks that layouts and the scale are equal, and compares codes."""
  for layout in ("rows", "columns"):
    a, e = getattr(actual, layout), getattr(expected, layout)
    assert (a is None) == (e is None), layout
    if e is not None:
      assert_same_codes(a, e, share)
  np.testing.assert_array_equal(actual.scale, expected.scale)


def assert_same_groups(actual, expected, share: float = 1.0):
  """Compares codes, and checks that scales are equal, including NaN."""
  assert_same_codes(actual.qvalue, expected.qvalue, share)
  assert actual.scale.dtype == expected.scale.dtype
  scales = [np.asarray(q.scale, np.float32) for q in (actual, expected)]
  np.testing.assert_array_equal(*scales)
