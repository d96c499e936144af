# SPDX-License-Identifier: Apache-2.0
"""Compiles the plain-JAX step for an H200, and counts the bytes it moves."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import codecs
from coat_jax.optimizer.fused import fused_coat_adamw
from tests.aot.compiling import bytes_moved, compile_for_h200, temporary_bytes

pytestmark = pytest.mark.aot

SHAPE = (2**13, 2**13)
CODES = 2  # Bytes of codes per parameter, for two moments.


def compiled_step(rounding, dtype):
  optimizer = fused_coat_adamw(
    1e-3, codec=codecs.coat(rounding=rounding), implementation="xla"
  )
  p = jax.ShapeDtypeStruct(SHAPE, dtype)
  state = jax.eval_shape(optimizer.init, p)

  def step(p, state, g):
    return optimizer.apply(g, state, p)

  return compile_for_h200(step, p, state, p, donate=(0, 1))


# Without barriers between passes, XLA would write both moments to memory in
# f32, read them again (16 bytes), and write a byte or two for every comparison.
# It would move 41 bytes per parameter in bf16, and 47 in f32.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_step_moves_few_bytes(rounding, dtype):
  compiled = compiled_step(rounding, dtype)
  size, drafted = jnp.dtype(dtype).itemsize, rounding == "stochastic"
  expected = (
    (3 if drafted else 2) * (size + CODES)  # Passes read gradients and codes.
    + 2 * CODES * drafted
    + 2 * size  # The parameter is read and written.
    + CODES
    + 2 * CODES  # XLA copies the old codes before it overwrites them.
    + (size + 2)  # XLA checks the gradient for NaN separately.
  )
  count = SHAPE[0] * SHAPE[1]
  # Statistics take 10 bytes per group of 128, and some are read 12 times.
  assert bytes_moved(compiled) / count < expected + 2
  assert temporary_bytes(compiled) / count < CODES * (1 + drafted) + 0.5
