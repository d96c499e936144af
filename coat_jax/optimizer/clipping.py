# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping for steps that run inside the backward pass.

The global norm is known only once all gradients exist. `step_in_backward` uses
each gradient as soon as it exists, so it must clip by the norms of earlier
steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import (
  POSITIVE,
  Range,
  check_choice,
  check_kind,
  check_number,
  check_whole,
)
from coat_jax.optimizer.masks import leaf_paths

Rule = Literal["share", "adaptive"]

_LARGEST = float(jnp.finfo("float32").max)
# If any value exceeds `_LARGE`, all values are divided by `_RATIO` before they
# are squared. If none does, the sum of almost 2^48 squares fits in f32.
_LARGE, _RATIO = 2.0**40, 2.0**80


class ClipState(NamedTuple):
  """The state of clipping between steps.

  Attributes:
    steps: int32 [], the number of finished steps.
    norm: f32 [], the global norm of the last step's gradients before clipping.
    own: each slice's number r, which `Clipping` defines: a tree with the
      parameters' structure, f32 [] per leaf, or [layers] for a stacked leaf.
  """

  steps: Array
  norm: Array
  own: Any


@dataclasses.dataclass(frozen=True)
class Clipping:
  """Clips gradients by the norms of earlier steps, for `step_in_backward`.

  A slice is the gradient of a leaf, or of one layer of a stacked leaf. A slice
  with norm n is scaled by min(1, limit / n):

  share      limit = max_norm * r / N, where r is the slice's norm and N the
             global norm, both in the previous step before clipping. The
             squares of all limits add up to max_norm^2, so the clipped global
             norm does not exceed max_norm.
  adaptive   (AdaGC) like "share" in the first `warmup` steps. After them,
             limit = relative * r, where r is the running mean of the slice's
             clipped norms. The mean starts at the clipped norm of the last
             warm-up step. If `warmup` or this norm is 0, the mean starts at
             the next clipped norm above 0.

  In the first step, and for slices whose r is 0, the limit is max_norm, so the
  clipped global norm may exceed max_norm. A slice whose norm reaches 3.4e38,
  f32's largest value, is scaled by 0, so that parameters and states stay finite
  for finite gradients of any size.

  Attributes:
    rule: "share" or "adaptive".
    max_norm: the limit of the global norm, as in ordinary clipping.
    relative: ratio of the limit to the running mean.
    decay: decay rate of the running mean.
    warmup: number of steps before "adaptive" uses running means.

  Raises:
    TypeError: `max_norm`, `relative` or `decay` is not a number, or `warmup` is
      not a whole number.
    ValueError: the rule is unknown, or a number is outside its range.

  Source: arXiv:2502.11034, algorithm 1, which clips by the global norm during
  the warm-up.
  """

  rule: Rule = "share"
  max_norm: float = 1.0
  relative: float = 1.05
  decay: float = 0.98
  warmup: int = 100

  def __post_init__(self):
    remedy = "pass 'share', which bounds the global norm"
    check_choice("Clipping", "rule", self.rule, get_args(Rule), remedy)
    nothing = "to clip nothing pass clip=None"
    for name, allowed, remedy in (
      ("max_norm", POSITIVE, nothing),
      ("relative", POSITIVE, nothing),
      ("decay", Range(0, 1), "0.98 is usual"),
    ):
      check_number("Clipping", name, getattr(self, name), allowed, remedy)
    allowed = Range(0, 2**31 - 1)
    check_whole("Clipping", "warmup", self.warmup, allowed, "100 is usual")

  def init(
    self, params: Any, *, stack: str | Sequence[str] = "layers"
  ) -> ClipState:
    """Makes the state before the first step.

    `stack` is the path of the stacked layers, as for `step_in_backward`, or a
    sequence of several paths.
    """
    own = jax.tree.structure(params).unflatten(
      jnp.zeros(shape) for shape in _own_shapes(params, stack)
    )
    return ClipState(jnp.int32(0), jnp.float32(0), own)

  def scale(
    self, state: ClipState, own: Array, norm: Array
  ) -> tuple[Array, Array]:
    """Returns the factor for a slice's gradient, and the slice's next r.

    `own` is the slice's r in the state; `norm` is the gradient's `global_norm`
    over all devices. For several slices, `own` and `norm` are arrays.
    """
    # Divide first, because max_norm * own may overflow.
    limit = self.max_norm * (own / state.norm)
    is_warm = state.steps >= self.warmup
    if self.rule == "adaptive":
      limit = jnp.where(is_warm, self.relative * own, limit)
    limit = jnp.where(own > 0, limit, self.max_norm)
    scale = jnp.where(norm <= limit, 1.0, limit / norm)
    scale = jnp.where(norm == _LARGEST, 0.0, scale)
    if self.rule == "share":
      return scale, norm
    clipped = scale * norm
    mean = self.decay * own + (1 - self.decay) * clipped
    mean = jnp.where(own > 0, mean, clipped)  # The first norm above 0.
    first = jnp.where(state.steps == self.warmup - 1, clipped, norm)
    return scale, jnp.where(is_warm, mean, first)

  def next_state(
    self, state: ClipState, own: Sequence[Any], norm: Array
  ) -> ClipState:
    """Returns the next state, given the slices' next r and the global norm."""
    tree = jax.tree.structure(state.own).unflatten(own)
    return ClipState(state.steps + 1, norm, tree)


def global_norm(tree: Any) -> Array:
  """Returns the Euclidean norm of all leaves, finite for finite leaves."""
  # A norm above f32's largest value becomes that value.
  leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(tree)]
  amax = jnp.float32(0)
  for x in leaves:
    amax = jnp.maximum(amax, jnp.max(jnp.abs(x), initial=0))
  is_large = (amax > _LARGE) & jnp.isfinite(amax)
  # With a constant c, XLA would turn (x c)(x c) into x x c^2, and overflow.
  smaller = jnp.where(is_large, 1 / _RATIO, 1)
  square = jnp.float32(0)
  for x in leaves:
    square = square + jnp.sum(jnp.square(x * smaller))
  norm = jnp.sqrt(square)
  return jnp.where(is_large, jnp.minimum(norm * _RATIO, _LARGEST), norm)


def is_stacked(params: Any, stack: str | Sequence[str]) -> list[bool]:
  """Lists for each leaf of `params` whether it is below a path of `stack`."""
  stacks = stack if isinstance(stack, tuple | list) else (stack,)
  for path in stacks:
    check_kind("step_in_backward", "stack", path, str, "pass a path in params")
  below = tuple(f"{path}/" for path in stacks)
  return [path.startswith(below) for path, _ in leaf_paths(params)]


def _own_shapes(
  params: Any, stack: str | Sequence[str]
) -> list[tuple[int, ...]]:
  """Lists the shape of each leaf's numbers r in a `ClipState`."""
  leaves = zip(jax.tree.leaves(params), is_stacked(params, stack), strict=True)
  return [leaf.shape[:1] if stacked else () for leaf, stacked in leaves]


def own_numbers(
  state: ClipState, params: Any, stack: str | Sequence[str]
) -> list[Array]:
  """Lists each leaf's numbers r; raises if they are of other parameters."""
  got = [(path, x.shape) for path, x in leaf_paths(state.own)]
  paths = [path for path, _ in leaf_paths(params)]
  wanted = list(zip(paths, _own_shapes(params, stack), strict=True))
  if got != wanted:
    wrong = [
      f"{a} for {b}" for a, b in zip(got, wanted, strict=False) if a != b
    ]
    raise ValueError(
      "step_in_backward: clip_state must be for these parameters and this "
      f"stack, got {(wrong or [f'{len(got)} leaves for {len(wanted)}'])[0]}; "
      f"start with clip.init(params, stack={stack!r})"
    )
  return jax.tree.leaves(state.own)


def clip_gradients(
  clip: Clipping,
  state: ClipState,
  grads: Any,
  *,
  stack: str | Sequence[str] = "layers",
) -> tuple[Any, ClipState, Array]:
  """Clips a whole tree of gradients as `step_in_backward` does.

  Returns the clipped gradients in f32, the new state, and the global norm
  before clipping.
  """
  leaves, treedef = jax.tree.flatten(grads)
  owns = own_numbers(state, grads, stack)
  clipped, new, norms = [], [], []
  stacks = is_stacked(grads, stack)
  for g, own, stacked in zip(leaves, owns, stacks, strict=True):
    g = jnp.asarray(g, jnp.float32)
    norm = jax.vmap(global_norm)(g) if stacked else global_norm(g)
    scale, own = clip.scale(state, own, norm)
    clipped.append(g * jnp.expand_dims(scale, range(scale.ndim, g.ndim)))
    new.append(own)
    norms.append(norm)
  state = clip.next_state(state, new, global_norm(norms))
  return treedef.unflatten(clipped), state, state.norm
