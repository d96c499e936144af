# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel that copies rows by index with NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics.formats import E4M3
from coat_jax.pallas.mosaic.take_rows import take_rows
from tests.pallas.kernels import refused
from tests.pallas.mosaic.test_codes import parts_of


def check(tokens, rows, n, dtype, **options):
  x = parts_of((tokens, n), E4M3).astype(dtype)
  index = np.random.default_rng(1).integers(0, tokens, rows, np.int32)
  index[-1] = tokens - 1
  found = np.asarray(take_rows(x, jnp.asarray(index), **options))
  bits = np.dtype(f"u{found.dtype.itemsize}")
  np.testing.assert_array_equal(
    found.view(bits), np.asarray(x)[index].view(bits)
  )


# With 80 rows, two programs copy some of the same rows. In the last case,
# shared memory holds only two rows.
@pytest.mark.parametrize(
  "tokens, rows, n, dtype",
  [
    (20, 80, 256, E4M3),
    (5, 32, 128, jnp.bfloat16),
    (3, 33, 16384, jnp.bfloat16),
  ],
  ids=str,
)
def test_rows_are_copied_bit_for_bit(tokens, rows, n, dtype):
  check(tokens, rows, n, dtype, interpret=True)


def test_kernel_refuses_unsupported_arguments():
  index = jnp.zeros(32, jnp.int32)
  for n in (64, 16512):
    with refused(rf"at most 32768 bytes, got bfloat16\[4, {n}\]"):
      take_rows(jnp.zeros((4, n), jnp.bfloat16), index)
  with refused("at least 32 rows, got 31"):
    take_rows(jnp.zeros((4, 128)), index[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [128, 2048, 16384])
@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16])
def test_rows_on_a_gpu_are_copied_bit_for_bit(n, dtype):
  check(8192, 40_005, n, dtype)
