# SPDX-License-Identifier: Apache-2.0
"""Compares fused weights with formulas, and splits them again."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax.models import ModelConfig
from coat_jax.models.hf.tensors import Layout
from coat_jax.models.params import matrix_split

N, K, H, D = 6, 2, 4, 5
QKV, GATE_UP = "attention/qkv/linear/kernel", "mlp/gate_up/kernel"
CONFIG = ModelConfig(
  family="llama",
  num_layers=1,
  d_model=N * H,
  d_ff=7,
  num_heads=N,
  num_kv_heads=K,
  vocab_size=8,
)


def kernels(dtype, *rows):
  """Makes arrays of distinct values in the dtype."""
  rng = np.random.default_rng(0)
  bits = rng.permutation(2**14)[: sum(rows) * D].astype(np.uint16)
  values = np.split(bits.view(dtype).reshape(-1, D), np.cumsum(rows)[:-1])
  return [jnp.asarray(x) for x in values]


def assert_equal(found, wanted):
  for x, y in zip(found, wanted, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_columns_of_qkv_are_grouped_by_key_head(dtype):
  q, k, v = kernels(dtype, N * H, K * H, K * H)
  split, shape = matrix_split(QKV, CONFIG), (D, (N + 2 * K) * H)
  packed = Layout(("q", "k", "v"), True).pack((q, k, v), shape, split)
  assert packed.shape == shape and packed.dtype == dtype
  column = 0
  for key_head in range(K):
    heads = [q[(key_head * N // K + i) * H :][:H] for i in range(N // K)]
    for head in (*heads, k[key_head * H :][:H], v[key_head * H :][:H]):
      for row in head:
        np.testing.assert_array_equal(packed[:, column], row)
        column += 1
  assert_equal(Layout(("q", "k", "v"), True).unpack(packed, split), (q, k, v))
  # A checkpoint may have one tensor with q, k and v as its rows or columns.
  one = jnp.concatenate([q, k, v])
  assert_equal([Layout(("qkv",), True).pack([one], shape, split)], [packed])
  assert_equal(Layout(("qkv",), True).unpack(packed, split), [one])
  assert_equal([Layout(("qkv",)).pack([one.T], shape, split)], [packed])
  assert_equal(Layout(("qkv",)).unpack(packed, split), [one.T])


def test_qkv_biases_follow_the_order_of_the_columns():
  tensors = kernels(np.float16, N * H, K * H, K * H)
  biases, split = [x[:, 0] for x in tensors], matrix_split(QKV, CONFIG)
  size = (N + 2 * K) * H
  row = Layout(("q", "k", "v"))
  packed = row.pack(biases, (size,), split)
  of_kernel = Layout(("q", "k", "v"), True).pack(tensors, (D, size), split)
  np.testing.assert_array_equal(packed, of_kernel[0])
  assert_equal(row.unpack(packed, split), biases)


def test_gate_comes_before_up():
  gate, up = kernels(np.float16, 7, 7)
  split, row = matrix_split(GATE_UP, CONFIG), Layout(("gate", "up"), True)
  packed = row.pack((gate, up), (D, 2, 7), split)
  np.testing.assert_array_equal(packed[:, 0], gate.T)
  np.testing.assert_array_equal(packed[:, 1], up.T)
  assert_equal(row.unpack(packed, split), (gate, up))
  one = jnp.concatenate([gate, up])
  assert_equal(
    [Layout(("both",), True).pack([one], (D, 2, 7), split)], [packed]
  )
  assert_equal(Layout(("both",), True).unpack(packed, split), [one])
