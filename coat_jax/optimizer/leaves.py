# SPDX-License-Identifier: Apache-2.0
"""A step of an optimizer, leaf by leaf.

What `step_in_backward` needs of an optimizer: each leaf, and of stacked leaves
each layer, is stepped when its gradient exists, in whatever order they come.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax


class LeafSteps(NamedTuple):
  """One step of an optimizer, to be taken leaf by leaf.

  Attributes:
    weights: the parameters' leaves, in the order of the tree; each an array, or
      a tree of arrays of one shape.
    stored: for each leaf what the optimizer keeps of it, a tree: arrays whose
      leading axes are the leaf's, and scalars.
    step: `step(i, weight, gradient, stored, *, layer=None, grad_scale=None)`,
      the new weight and what is kept of leaf i. With `layer`, int32 [], both
      are of stacked layers and this one is stepped; its gradient is [1, ...].
    end: `end(weights, stored)`, the new parameters and the new state.
  """

  weights: Sequence[Any]
  stored: Sequence[Any]
  step: Callable[..., tuple[Any, Any]]
  end: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]


def take_layer(stacked: Any, layer: Array) -> Any:
  """One layer, [1, ...], of each array of a tree; scalars as they are."""
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, layer, 1) if x.ndim else x, stacked
  )


def put_layer(stacked: Any, new: Any, layer: Array) -> Any:
  """The inverse of `take_layer`: `stacked` with one layer replaced."""

  def put(x, y):
    return lax.dynamic_update_slice_in_dim(x, y, layer, 0) if x.ndim else x

  return jax.tree.map(put, stacked, new)
