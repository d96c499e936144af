# SPDX-License-Identifier: Apache-2.0
"""Comparisons that several test files share."""

import functools

import jax
import numpy as np

# `jax.jit` that compiles in half the time; what is compiled here runs but once.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_close(actual, expected, tolerance: float = 1e-5, name: str = ""):
  """Leaf by leaf, |actual - expected| <= tolerance times the leaf's largest.

  Relative to the largest magnitude and not to each value: sums cancel, and what
  cancelled keeps the rounding errors of its terms.
  """
  actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
  assert len(actual) == len(expected)
  for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    assert a.shape == e.shape, (name, i, a.shape, e.shape)
    # Not "> limit", which a NaN would pass.
    limit = tolerance * np.max(np.abs(e), initial=0.0)
    error = np.max(np.abs(a - e), initial=0.0)
    assert error <= limit, f"{name} leaf {i}: {error:.3g} > {limit:.3g}"


def assert_same_bits(actual, expected):
  """Leaf by leaf the same dtype, shape and bytes."""
  actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
  assert len(actual) == len(expected)
  for a, e in zip(actual, expected, strict=True):
    a, e = np.asarray(a), np.asarray(e)
    assert a.dtype == e.dtype and a.shape == e.shape
    np.testing.assert_array_equal(
      np.atleast_1d(a).view(np.uint8), np.atleast_1d(e).view(np.uint8)
    )
