# SPDX-License-Identifier: Apache-2.0
"""Fuses a checkpoint's separate weights, and splits them again.

Kernels in checkpoints are [outputs, inputs], as in PyTorch; ours are [inputs,
outputs]. The functions only move values and never compute with them, so each
pair is exact in both directions and for every dtype. They accept NumPy arrays
and JAX arrays, also while JAX traces.
"""

from typing import Any

import jax.numpy as jnp

from coat_jax.checks import COUNT, check_array, check_whole


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
    TypeError: an argument of another kind.
    ValueError: sizes are not multiples of K, or shapes do not fit.
  """
  op = "pack_qkv"
  _check_heads(op, num_kv_heads=num_kv_heads)
  for name, x in (("q", q), ("k", k), ("v", v)):
    _check_array(op, name, x)
    if x.shape[0] % num_kv_heads or x.shape[1:] != q.shape[1:]:
      raise ValueError(
        f"{op}: {name} must be [heads H, D] with a multiple of {num_kv_heads} "
        f"heads, got {x.shape} with q {q.shape}; pass weights of one layer"
      )
  if k.shape != v.shape:
    raise ValueError(
      f"{op}: k and v must have one shape, got {k.shape} and {v.shape}; pass "
      "weights of one layer"
    )
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
    TypeError: an argument of another kind.
    ValueError: the columns do not divide into such heads.
  """
  op = "unpack_qkv"
  _check_heads(op, num_heads=num_heads, num_kv_heads=num_kv_heads)
  _check_array(op, "qkv", qkv)
  columns, count = qkv.shape[-1], num_heads + 2 * num_kv_heads
  if num_heads % num_kv_heads or columns % count:
    raise ValueError(
      f"{op}: qkv must have the columns of {num_heads} heads, a multiple of "
      f"{num_kv_heads}, and of twice {num_kv_heads}, got {columns}; pass the "
      "numbers of the model's config"
    )
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

  Raises:
    TypeError: no arrays.
    ValueError: shapes that differ.
  """
  for name, x in (("gate", gate), ("up", up)):
    _check_array("pack_gate_up", name, x)
  if gate.shape != up.shape:
    raise ValueError(
      f"pack_gate_up: gate and up must have one shape, got {gate.shape} and "
      f"{up.shape}; pass weights of one layer"
    )
  return gate.__array_namespace__().stack([gate.T, up.T], axis=1)


def unpack_gate_up(gate_up: Any) -> tuple[Any, Any]:
  """Inverts `pack_gate_up`.

  Args:
    gate_up: kernel [D, 2, F].

  Returns:
    gate and up, kernels [F, D].

  Raises:
    TypeError: no array.
    ValueError: another shape.
  """
  _check_array("unpack_gate_up", "gate_up", gate_up)
  if gate_up.ndim != 3 or gate_up.shape[1] != 2:
    raise ValueError(
      f"unpack_gate_up: gate_up must be [D, 2, F], got {gate_up.shape}; pass "
      "the kernel of one layer"
    )
  return gate_up[:, 0].T, gate_up[:, 1].T


def _check_array(op: str, name: str, x: Any) -> None:
  rule, remedy = "an array", "pass a kernel or a bias"
  ranks, kind = range(1, 65), jnp.number
  check_array(op, name, x, rule, ndim=ranks, kind=kind, remedy=remedy)


def _check_heads(op: str, **counts: Any) -> None:
  for name, count in counts.items():
    check_whole(op, name, count, COUNT, "pass that of the model's config")
