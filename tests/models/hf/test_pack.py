# SPDX-License-Identifier: Apache-2.0
"""Fused weights: where each row goes, from formulas, and back again."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax.models import (
  pack_gate_up,
  pack_qkv,
  unpack_gate_up,
  unpack_qkv,
)

N, K, H, D = 6, 2, 4, 5


def kernels(namespace, dtype, *rows):
  """Arrays whose values are all different in every dtype."""
  rng = np.random.default_rng(0)
  bits = rng.permutation(2**14)[: sum(rows) * D].astype(np.uint16)
  values = np.split(bits.view(dtype).reshape(-1, D), np.cumsum(rows)[:-1])
  return [namespace.asarray(x) for x in values]


def assert_equal(found, wanted):
  for x, y in zip(found, wanted, strict=True):
    assert type(x) is type(y) and x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("namespace", [np, jnp])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_columns_of_qkv_are_by_key_head(namespace, dtype):
  q, k, v = kernels(namespace, dtype, N * H, K * H, K * H)
  packed = pack_qkv(q, k, v, num_kv_heads=K)
  assert isinstance(packed, type(q)) and packed.dtype == dtype
  assert packed.shape == (D, (N + 2 * K) * H)
  column = 0
  for key_head in range(K):
    heads = [q[(key_head * N // K + i) * H :][:H] for i in range(N // K)]
    for head in (*heads, k[key_head * H :][:H], v[key_head * H :][:H]):
      for row in head:
        np.testing.assert_array_equal(packed[:, column], row)
        column += 1
  back = unpack_qkv(packed, num_heads=N, num_kv_heads=K)
  assert_equal(back, (q, k, v))


def test_biases_of_qkv_have_the_order_of_its_columns():
  kernel = kernels(np, np.float16, N * H, K * H, K * H)
  biases = [x[:, 0].copy() for x in kernel]
  packed = pack_qkv(*biases, num_kv_heads=K)
  np.testing.assert_array_equal(packed, pack_qkv(*kernel, num_kv_heads=K)[0])
  assert_equal(unpack_qkv(packed, num_heads=N, num_kv_heads=K), biases)


@pytest.mark.parametrize("namespace", [np, jnp])
def test_gate_is_in_front_of_up(namespace):
  gate, up = kernels(namespace, np.float16, 7, 7)
  packed = pack_gate_up(gate, up)
  assert isinstance(packed, type(gate)) and packed.shape == (D, 2, 7)
  np.testing.assert_array_equal(packed[:, 0], gate.T)
  np.testing.assert_array_equal(packed[:, 1], up.T)
  assert_equal(unpack_gate_up(packed), (gate, up))
