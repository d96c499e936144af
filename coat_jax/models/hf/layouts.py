# SPDX-License-Identifier: Apache-2.0
"""Packs a checkpoint's tensors into a parameter, and unpacks them again.

A parameter is cut into matrices (`MatrixSplit`). A checkpoint stores each
matrix as a tensor, usually transposed as in PyTorch, or concatenates all of
them into one tensor. Packing only moves values, so it is exact in both
directions and in every dtype.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, P

from coat_jax.optimizer.matrices import (
  MatrixSplit,
  join_matrices,
  split_matrices,
)


class Row(NamedTuple):
  """The tensors of one parameter, or of one layer of a stacked parameter.

  Attributes:
    names: one name per matrix, or one for all; `{i}` stands for the index of
      the layer, and `{e}` for the index of the expert.
    is_transposed: whether tensors are [outputs, inputs], as in PyTorch.
    shape: the tensor's shape, if that has more axes than the parameter's.
  """

  names: tuple[str, ...]
  is_transposed: bool = False
  shape: tuple[int, ...] | None = None

  @property
  def is_of_experts(self) -> bool:
    """Returns whether each expert has its own tensors."""
    return "{e}" in self.names[0]

  def of_layer(self, i: int, num_experts: int | None) -> list[str]:
    """Lists the names of the tensors of layer `i`, expert by expert."""
    count = (num_experts or 1) if self.is_of_experts else 1
    return [name.format(i=i, e=e) for e in range(count) for name in self.names]

  def spec(self, spec: P) -> P:
    """Converts the sharding of a parameter to the sharding of its tensors."""
    spec = P(*spec[1:]) if self.is_of_experts else spec
    return P(spec[-1], spec[0]) if self.is_transposed else spec

  def pack(
    self,
    tensors: Sequence[Array],
    shape: tuple[int, ...],
    split: MatrixSplit | None,
  ) -> Array:
    """Makes a parameter of `shape` from its tensors."""
    if split is None:
      (x,) = tensors
      own = shape[::-1] if self.is_transposed else shape
      return x.reshape(own).T if self.is_transposed else x.reshape(own)
    if self.is_transposed:
      tensors = [x.T for x in tensors]
    if len(tensors) == 1:  # Its columns may contain all matrices.
      widths = [split.groups * width for width in split.parts] or [shape[-1]]
      ends = np.cumsum(widths * (tensors[0].shape[-1] // sum(widths)))
      tensors = jnp.split(tensors[0], ends[:-1].tolist(), axis=-1)
    return join_matrices(tensors, split, shape)

  def unpack(self, x: Array, split: MatrixSplit | None) -> list[Array]:
    """Inverts `pack`."""
    found = [x] if split is None else split_matrices(x, split)
    if len(self.names) == 1 and not self.is_of_experts:
      found = [jnp.concatenate(found, axis=-1)]
    if self.is_transposed:
      found = [x.T for x in found]
    return [x.reshape(self.shape or x.shape) for x in found]


def plain(*names: str) -> Row:
  """Makes the row of a parameter whose tensors are not transposed."""
  return Row(names)


def kernel(*names: str) -> Row:
  """Makes the row of a kernel whose tensors are transposed matrices."""
  return Row(names, is_transposed=True)
