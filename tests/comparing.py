# SPDX-License-Identifier: Apache-2.0
"""Functions that compare arrays or trees, for all tests."""

import functools

import jax
import numpy as np

# `jax.jit` that compiles in half the time, for programs that run only once.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_close(actual, expected, tolerance: float = 1e-5, name: str = ""):
  """Checks |actual - expected| <= tolerance * max |expected| in each leaf.

  The error is relative to the largest magnitude of a leaf, not to each value: a
  sum whose terms cancel is small, but has the rounding errors of its terms.
  """
  actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
  assert len(actual) == len(expected)
  for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    assert a.shape == e.shape, (name, i, a.shape, e.shape)

    limit = tolerance * np.max(np.abs(e), initial=0.0)
    error = np.max(np.abs(a - e), initial=0.0)
    # This fails for NaN, and `not error > limit` would not.
    assert error <= limit, f"{name} leaf {i}: {error:.3g} > {limit:.3g}"


def assert_same_bits(actual, expected):
  """Checks that all leaves have the same dtype, shape and bytes."""
  actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
  assert len(actual) == len(expected)
  for a, e in zip(actual, expected, strict=True):
    a, e = np.asarray(a), np.asarray(e)
    assert a.dtype == e.dtype and a.shape == e.shape
    np.testing.assert_array_equal(
      np.atleast_1d(a).view(np.uint8), np.atleast_1d(e).view(np.uint8)
    )
