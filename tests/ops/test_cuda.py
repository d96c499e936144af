# SPDX-License-Identifier: Apache-2.0
"""Compares plain FP8 casts (one GPU instruction) with the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.scaling import GRADIENTS, Blocks, PerTensor
from coat_jax.ops.dispatch import Unsupported
from tests import cases
from tests.comparing import assert_same_bits, jit
from tests.pallas.kernels import assert_same_codes, lowered_for_h200


def near_ties() -> np.ndarray:
  """Returns all E4M3 values, their midpoints, and the midpoints' neighbours."""
  values = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
  ties = (values[1:] + values[:-1]) / 2
  near = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
  x = np.concatenate([values, ties, *near, [449, 463, 464, 465, np.inf]])
  return np.concatenate([x, -x, [np.nan]]).astype(np.float32)[None, :]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "x, scale",
  [(near_ties(), 1.0), (cases.activations((64, 96)), 0.0137)],
  ids=["ties", "activations"],
)
def test_plain_cast_matches_the_definition(x, scale, dtype):
  x, scale = jnp.asarray(x, dtype), jnp.float32(scale)
  actual = jit(ops.quantize_rows.kernel("cuda"))(x, scale=scale)
  expected = jit(ops.quantize_rows.definition)(x, scale=scale)
  assert_same_codes(actual, expected)
  whole = ops.quantize_tensor.definition(x, scale=scale)
  assert_same_codes(actual, whole.rows)


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("has_scale", [False, True])
def test_plain_cast_of_experts_matches_the_definition(layout, has_scale):
  w = jnp.asarray(cases.activations((3, 64, 96)), jnp.bfloat16)
  w = w * jnp.asarray([1, 1e-3, 0], w.dtype)[:, None, None]
  scale = jnp.float32([0.0137, 1e-4, 1]) if has_scale else None
  actual, expected = (
    jit(run, static_argnames="layout")(w, scale=scale, layout=layout)
    for run in (
      ops.quantize_experts.kernel("cuda"),
      ops.quantize_experts.definition,
    )
  )
  assert_same_bits(actual.scale, expected.scale)
  for x, y in (
    (actual.rows, expected.rows),
    (actual.columns, expected.columns),
  ):
    assert (x is None) == (y is None)
    if x is not None:
      assert_same_codes(x, y)


def test_plain_cast_of_experts_needs_e4m3_and_a_scale_per_tensor():
  w = jnp.ones((2, 32, 32))

  class Other(PerTensor):
    pass

  for scaling, why in (
    (GRADIENTS, "a cast to"),
    (Blocks(), "per tensor"),
    (Other(), "per tensor"),
  ):
    with pytest.raises(Unsupported, match=why):
      ops.quantize_experts.kernel("cuda")(w, scaling=scaling)


def test_program_for_a_gpu_does_not_round_before_the_cast():
  x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((), jnp.float32)
  w = jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16)
  for fn, args in (
    (lambda x, s: ops.quantize_rows(x, scale=s), (x, scale)),
    (lambda w: ops.quantize_experts(w).rows, (w,)),
  ):
    text = lowered_for_h200(fn, *args)
    assert "round" not in text and "divide" in text
    # XLA must not fuse the cast with a cast back, and drop both.
    assert "optimization_barrier" in text
