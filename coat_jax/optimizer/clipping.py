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
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.checks import (
  POSITIVE,
  Range,
  check_kind,
  check_number,
  check_whole,
)
from coat_jax.optimizer.masks import leaf_paths

Rule = Literal["share", "adaptive"]


class ClipState(NamedTuple):
  """What clipping keeps from step to step.

  Attributes:
    steps: int32 [], how many are done.
    norm: f32 [], global norm of the last step's gradients before clipping.
    own: norms of all slices: a tree of the parameters' structure, f32 [], or
      [layers] of a stacked leaf.
  """

  steps: Array
  norm: Array
  own: Any


@dataclasses.dataclass(frozen=True)
class Clipping:
  """A rule that clips a slice of the gradients by what earlier steps had.

  A slice with norm n is scaled by min(1, limit / n):

  share      limit = max_norm r / N, with r the slice's norm and N the global
             norm of the step before, both before clipping. The squares of all
             limits add up to max_norm^2: the global norm is never above it.
  adaptive   limit = relative r, with r the running mean of the slice's own
             clipped norms (AdaGC); as "share" in the first `warmup` steps

  A slice that had no gradient, and all of them in the first step, may have
  max_norm.

  Attributes:
    rule: "share" or "adaptive".
    max_norm: as of clipping by the global norm.
    relative: how far above its running mean a norm may be.
    decay: of the running mean.
    warmup: steps until running means are used.

  Raises:
    TypeError: a limit that is no number, or a fraction of a step.
    ValueError: another rule, or a number outside its range.

  Source: arXiv:2502.11034, algorithm 1, which clips by the global norm during
  the warm-up.
  """

  rule: Rule = "share"
  max_norm: float = 1.0
  relative: float = 1.05
  decay: float = 0.98
  warmup: int = 100

  def __post_init__(self):
    if self.rule not in get_args(Rule):
      got = repr(self.rule)
      if self.rule == "global":
        got += ", which needs all gradients at once"
      raise ValueError(
        f"Clipping: rule must be 'share' or 'adaptive', got {got}; pass "
        "'share', which bounds the global norm too"
      )
    nothing = "to clip nothing pass clip=None"
    for name, allowed, remedy in (
      ("max_norm", POSITIVE, nothing),
      ("relative", POSITIVE, nothing),
      ("decay", Range(0, 1), "0.98 is usual"),
    ):
      check_number("Clipping", name, getattr(self, name), allowed, remedy)
    allowed = Range(0, 2**31 - 1)
    check_whole("Clipping", "warmup", self.warmup, allowed, "100 is usual")

  def init(self, params: Any, *, stack: str = "layers") -> ClipState:
    """The state before the first step.

    Args:
      params: tree of parameters.
      stack: as of `step_in_backward`: the path of the stacked layers.

    Returns:
      Zeros.
    """
    leaves, treedef = jax.tree.flatten(params)
    own = treedef.unflatten(
      jnp.zeros(leaf.shape[:1] if stacked else ())
      for leaf, stacked in zip(leaves, is_stacked(params, stack), strict=True)
    )
    return ClipState(jnp.int32(0), jnp.float32(0), own)

  def scale(
    self, state: ClipState, own: Array, square: Array
  ) -> tuple[Array, Array]:
    """What a slice's gradient is multiplied with.

    Args:
      state: before this step.
      own: f32, what the state has of the slice.
      square: f32, the sum of the gradient's squares, over all devices; or
        those of several slices, of own's shape.

    Returns:
      The scale, and what the next state has of the slice.
    """
    norm = jnp.sqrt(square)
    limit, is_warm = self.max_norm * own / state.norm, False
    if self.rule == "adaptive":
      is_warm = state.steps >= self.warmup
      limit = jnp.where(is_warm, self.relative * own, limit)
    limit = jnp.where(own > 0, limit, self.max_norm)
    scale = jnp.where(norm <= limit, 1.0, limit / norm)
    if self.rule == "share":
      return scale, norm
    clipped = scale * norm
    mean = self.decay * own + (1 - self.decay) * clipped
    first = jnp.where(state.steps == self.warmup - 1, clipped, norm)
    return scale, jnp.where(is_warm, mean, first)

  def next_state(
    self, state: ClipState, own: Sequence[Any], square: Array
  ) -> ClipState:
    """The state after a step.

    Args:
      state: before it.
      own: what `scale` gave for each leaf.
      square: f32, the sum of the squares of all gradients.
    """
    tree = jax.tree.structure(state.own).unflatten(own)
    return ClipState(state.steps + 1, jnp.sqrt(square), tree)


def is_stacked(params: Any, stack: str) -> list[bool]:
  """Whether each leaf of `params`, in order, is below the path `stack`."""
  check_kind("step_in_backward", "stack", stack, str, "pass a path in params")
  return [path.startswith(f"{stack}/") for path, _ in leaf_paths(params)]


def clip_gradients(
  clip: Clipping, state: ClipState, grads: Any, *, stack: str = "layers"
) -> tuple[Any, ClipState, Array]:
  """Clips gradients that are all there, by the same rules.

  Args:
    clip: the rule.
    state: before this step.
    grads: tree of gradients.
    stack: as of `Clipping.init`.

  Returns:
    The clipped gradients, f32; the new state; and the global norm before
    clipping, f32 [].
  """
  leaves, treedef = jax.tree.flatten(grads)
  owns = jax.tree.leaves(state.own)
  clipped, new, total = [], [], jnp.float32(0)
  stacks = is_stacked(grads, stack)
  for g, own, stacked in zip(leaves, owns, stacks, strict=True):
    g = g.astype(jnp.float32)
    axes = tuple(range(1 if stacked else 0, g.ndim))
    square = jnp.sum(jnp.square(g), axis=axes)
    scale, own = clip.scale(state, own, square)
    clipped.append(g * jnp.expand_dims(scale, axes))
    new.append(own)
    total = total + jnp.sum(square)
  state = clip.next_state(state, new, total)
  return treedef.unflatten(clipped), state, state.norm
