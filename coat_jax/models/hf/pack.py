# SPDX-License-Identifier: Apache-2.0
"""Fuses a checkpoint's separate weights, and splits them again.

Kernels in checkpoints are [outputs, inputs], as in PyTorch; ours are [inputs,
outputs]. The functions only move values and never compute with them, so each
pair is exact in both directions and for every dtype. They accept NumPy arrays
and JAX arrays, also while JAX traces.
"""

from typing import Any


def pack_qkv(q: Any, k: Any, v: Any, *, num_kv_heads: int) -> Any:
  """Packs q, k and v as `Attention.qkv` stores them.

  Columns are ordered by key head: for each of the K key heads its N / K query
  heads, then its key, then its value.

  Args:
    q: kernel [N H, D], or bias [N H].
    k, v: kernels [K H, D], or biases [K H].
    num_kv_heads: K.

  Returns:
    Kernel [D, (N + 2 K) H], or bias [(N + 2 K) H], of the arrays' dtype.

  Raises:
    ValueError: sizes are not multiples of K.
  """
  heads = [x.reshape(num_kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
  packed = q.__array_namespace__().concatenate(heads, axis=1)
  return packed.reshape(-1, *q.shape[1:]).T


def unpack_qkv(
  qkv: Any, *, num_heads: int, num_kv_heads: int
) -> tuple[Any, Any, Any]:
  """Inverts `pack_qkv`.

  Args:
    qkv: kernel [D, (N + 2 K) H], or bias [(N + 2 K) H].
    num_heads: N.
    num_kv_heads: K.

  Returns:
    q [N H, D] and k, v [K H, D]; for a bias [N H] and [K H].

  Raises:
    ValueError: the columns do not divide into such heads.
  """
  rows, shared = qkv.T, num_heads // num_kv_heads
  others = rows.shape[1:]
  heads = rows.reshape(num_kv_heads, shared + 2, -1, *others)
  q, k, v = heads[:, :shared], heads[:, shared], heads[:, shared + 1]
  return tuple(x.reshape(-1, *others) for x in (q, k, v))


def pack_gate_up(gate: Any, up: Any) -> Any:
  """Packs gate and up as `GatedMLP.gate_up` stores them.

  Args:
    gate, up: kernels [F, D].

  Returns:
    Kernel [D, 2, F], gate first, of the arrays' dtype.
  """
  return gate.__array_namespace__().stack([gate.T, up.T], axis=1)


def unpack_gate_up(gate_up: Any) -> tuple[Any, Any]:
  """Inverts `pack_gate_up`.

  Args:
    gate_up: kernel [D, 2, F].

  Returns:
    gate and up, kernels [F, D].
  """
  return gate_up[:, 0].T, gate_up[:, 1].T
