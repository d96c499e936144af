# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients that do not wait for one another.

The global norm of all gradients is known after the last of them. A step that
uses each gradient as soon as it exists (`step_in_backward`) clips by what is
known by then: by the norms of the steps before. `Clipping` has the rules; what
they keep is a `ClipState`, which belongs into checkpoints.

A slice is a leaf or, of a stacked leaf, one layer of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Rule = Literal["previous", "adaptive"]


class ClipState(NamedTuple):
  """What clipping keeps from step to step.

  Attributes:
    count: int32 [], steps done.
    norm: f32 [], global norm of the last step's gradients before clipping.
    own: of rule "adaptive", running norms of all slices: a tree of the
      parameters' structure, f32 [], or [layers] of a stacked leaf; else ().
  """

  count: Array
  norm: Array
  own: Any


@dataclasses.dataclass(frozen=True)
class Clipping:
  """A rule that clips a slice of the gradients by what earlier steps had.

  previous   all slices are scaled by min(1, max_norm / N), with N the global
             norm of the step before
  adaptive   a slice with norm n is scaled by min(1, relative r / n), with r the
             running mean of its own clipped norms (AdaGC); in the first
             `warmup` steps as by "previous", r being the least norm so far

  Of the first step of all N is not known: each slice is scaled by
  min(1, max_norm / n).

  Attributes:
    rule: "previous" or "adaptive".
    max_norm: as of clipping by the global norm.
    relative: how far above its running mean a norm may be.
    decay: of the running mean.
    warmup: steps until running means are used.

  Source: arXiv:2502.11034, algorithm 1, which clips by the global norm during
  the warm-up.
  """

  rule: Rule = "adaptive"
  max_norm: float = 1.0
  relative: float = 1.05
  decay: float = 0.98
  warmup: int = 100

  def init(self, params: Any, *, is_stacked: Sequence[bool]) -> ClipState:
    """The state before the first step.

    Args:
      params: tree of parameters.
      is_stacked: of each leaf, whether its first axis is that of layers.

    Returns:
      Zeros.
    """
    own: Any = ()
    if self.rule == "adaptive":
      leaves, treedef = jax.tree.flatten(params)
      own = treedef.unflatten(
        jnp.zeros(leaf.shape[:1] if stacked else ())
        for leaf, stacked in zip(leaves, is_stacked, strict=True)
      )
    return ClipState(jnp.int32(0), jnp.float32(0), own)

  def scale(
    self, state: ClipState, own: Array | None, square: Array
  ) -> tuple[Array, Array | None]:
    """What a slice's gradient is multiplied with.

    Args:
      state: before this step.
      own: f32, the slice's running norm; None for rule "previous".
      square: f32, the sum of the gradient's squares, over all devices; or
        those of several slices, of own's shape.

    Returns:
      The scale, and the new running norm.
    """
    norm = jnp.sqrt(square)
    is_first = state.count == 0
    scale = _at_most(self.max_norm, jnp.where(is_first, norm, state.norm))
    if own is None:
      return scale, None
    is_warm = state.count >= self.warmup
    scale = jnp.where(is_warm, _at_most(self.relative * own, norm), scale)
    clipped = scale * norm
    least = jnp.where(is_first, clipped, jnp.minimum(own, clipped))
    mean = self.decay * own + (1 - self.decay) * clipped
    return scale, jnp.where(is_warm, mean, least)

  def next_state(
    self, state: ClipState, own: Sequence[Array | None], square: Array
  ) -> ClipState:
    """The state after a step.

    Args:
      state: before it.
      own: new running norms of all leaves.
      square: f32, the sum of the squares of all gradients.
    """
    trees = state.own
    if self.rule == "adaptive":
      trees = jax.tree.structure(state.own).unflatten(own)
    return ClipState(state.count + 1, jnp.sqrt(square), trees)


def clip_gradients(
  clip: Clipping, state: ClipState, grads: Any, *, is_stacked: Sequence[bool]
) -> tuple[Any, ClipState, Array]:
  """Clips gradients that are all there, by the same rules.

  Args:
    clip: the rule.
    state: before this step.
    grads: tree of gradients.
    is_stacked: as of `Clipping.init`.

  Returns:
    The clipped gradients, f32; the new state; and the global norm before
    clipping, f32 [].
  """
  leaves, treedef = jax.tree.flatten(grads)
  owns = [None] * len(leaves)
  if clip.rule == "adaptive":
    owns = jax.tree.leaves(state.own)
  clipped, new, total = [], [], jnp.float32(0)
  for g, own, stacked in zip(leaves, owns, is_stacked, strict=True):
    g = g.astype(jnp.float32)
    axes = tuple(range(1 if stacked else 0, g.ndim))
    square = jnp.sum(jnp.square(g), axis=axes)
    scale, own = clip.scale(state, own, square)
    clipped.append(g * jnp.expand_dims(scale, axes))
    new.append(own)
    total = total + jnp.sum(square)
  state = clip.next_state(state, new, total)
  return treedef.unflatten(clipped), state, state.norm


def _at_most(largest: Array | float, norm: Array) -> Array:
  """min(1, largest / norm), 1 where both are 0; NaN of a norm that is not
  finite, which the step reports."""
  return jnp.where(norm <= largest, 1.0, largest / norm)
