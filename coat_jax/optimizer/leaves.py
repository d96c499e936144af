# SPDX-License-Identifier: Apache-2.0
"""A step of an optimizer, leaf by leaf.

What `step_in_backward` needs of an optimizer: each leaf, and of stacked leaves
each layer, is stepped when its gradient exists, in whatever order they come.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array


class Layer(NamedTuple):
  """Which part of a stacked leaf [layers, ...] is at hand: [1, ...] of it.

  Attributes:
    index: int32 [], the layer.
    count: layers of the stack.
  """

  index: Array
  count: int


class LeafSteps(NamedTuple):
  """One step of an optimizer, to be taken leaf by leaf.

  Attributes:
    weights: the parameters' leaves, in the order of the tree; each an array, or
      a tree of arrays of one shape.
    stored: for each leaf what the optimizer keeps of it, a tree: arrays whose
      leading axes are the leaf's, and scalars.
    step: `step(i, weight, gradient, stored, *, layer=None, grad_scale=None)`,
      the new weight and what is kept of leaf i; with `layer` all of them are
      [1, ...] of stacked ones.
    end: `end(weights, stored)`, the new parameters and the new state.
  """

  weights: Sequence[Any]
  stored: Sequence[Any]
  step: Callable[..., tuple[Any, Any]]
  end: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]
