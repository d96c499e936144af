# SPDX-License-Identifier: Apache-2.0
"""Keeps XLA from storing f32 values between passes over memory on TPUs.

XLA for TPUs stores f32 values in two cases:

  - A reshape from groups to values is not fused, such as 688 groups of 16 (512
    groups are fused). XLA then stores an f32 scale for each value.
  - Two passes read the same f32 values.

The functions in this file prevent both. On other platforms they do nothing.
"""

import dataclasses
from typing import Any

from jax import Array, lax

from coat_jax.numerics.qtensor import QTensor, join_groups, split_groups
from coat_jax.ops.dispatch import target


def in_groups(x: Array, group_size: int) -> Array:
  """Makes XLA compute with x [..., n] in the shape [..., groups, group_size].

  Otherwise XLA might store an f32 scale for each value of x.
  """
  n = x.shape[-1]
  if target() != "tpu" or n % group_size:
    return x
  return join_groups(lax.optimization_barrier(split_groups(x, group_size)), n)


def codes_in_groups(x: QTensor) -> QTensor:
  """Applies `in_groups` to the codes of a `QTensor`."""
  if x.group_size is None:
    return x
  return dataclasses.replace(x, qvalue=in_groups(x.qvalue, x.group_size))


def read_again(arrays: Any, after: Any) -> tuple[Any, Any]:
  """Makes XLA read `arrays` again after it has computed `after` from them."""
  if target() != "tpu":
    return arrays, after
  return lax.optimization_barrier((arrays, after))
