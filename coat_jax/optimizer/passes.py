# SPDX-License-Identifier: Apache-2.0
"""Steps a leaf on a GPU in few passes over memory, without a kernel.

A group's statistics depend on all of its values, so a step must read its inputs
twice. By itself, XLA would store both new moments in f32 after the first read,
and spend more time on them than on everything else. Here each pass starts from
the stored moments and computes the same values again. (They may differ in the
last bit, because XLA may fuse multiplications and additions differently.)
Between passes, we store only what the codec's stages return (`codecs.lookup`).

All arrays are split into groups first, because XLA counts everything before a
reshape twice when it estimates the cost of a fusion.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax

from coat_jax.codecs.group import Encoded, Grouped
from coat_jax.codecs.lookup import stages_of
from coat_jax.numerics.qtensor import join_groups, split_groups


def can_run(groups: Sequence[Any], shape: tuple[int, ...]) -> bool:
  """Returns whether all moments use one group size, and it divides a row."""
  sizes = {getattr(x, "group_size", None) for x in groups}
  return (
    all(isinstance(x, Grouped) for x in groups)
    and len(sizes) == 1
    and bool(shape)
    and shape[-1] % groups[0].group_size == 0
  )


def run(
  groups: Sequence[Grouped],
  compute: Callable[..., tuple[Array, ...]],
  finish: Callable[[Array, Callable[[Array], Array]], Any],
  arrays: Any,
  stored: Sequence[Encoded],
  noise: Sequence[Array | None],
) -> tuple[Any, tuple[Encoded, ...]]:
  """Runs `compute`; returns its first result finished and the others encoded.

  Args:
    groups: the codecs of the moments.
    compute: `compute(arrays, *moments)` returns a result and the new moments,
      all f32; it must be elementwise, because its arrays are split into groups.
    finish: `finish(result, split)` returns a tree of arrays of the result's
      shape; `split` splits arrays of the leaf's shape into groups.
    arrays: a tree of arrays of the leaf's shape.
    stored: the moments.
    noise: for each moment, uniform noise of the leaf's shape, or None.
  """
  size, n = groups[0].group_size, stored[0].codes.shape[-1]
  stages = [stages_of(x) for x in groups]

  def split(x):
    return split_groups(x, size)

  def new(inputs):
    arrays, stored = inputs
    moments = [s.decode(x) for s, x in zip(stages, stored, strict=True)]
    return compute(arrays, *moments)

  def of_each(method, *args):
    pairs = zip(stages, *args, strict=True)
    return [getattr(stage, method)(*x) for stage, *x in pairs]

  inputs = jax.tree.map(split, arrays), [_split(x, size) for x in stored]
  statistics = of_each("statistics", new(inputs)[1:])
  inputs, statistics = lax.optimization_barrier((inputs, statistics))
  result, *values = new(inputs)
  drafts = of_each("draft", values, statistics)
  if any(draft is not None for draft in drafts):
    inputs, statistics, drafts = lax.optimization_barrier(
      (inputs, statistics, drafts)
    )
    result, *values = new(inputs)
  noise = [None if x is None else split(x) for x in noise]
  encoded = of_each("encode", values, noise, statistics, drafts)
  finished = jax.tree.map(lambda x: join_groups(x, n), finish(result, split))
  return finished, tuple(_join(x, n) for x in encoded)


def _split(encoded: Encoded, size: int) -> Encoded:
  codes, *statistics = encoded
  wide = [x[..., None] if x.ndim else x for x in statistics]
  return Encoded(split_groups(codes, size), *wide)


def _join(encoded: Encoded, n: int) -> Encoded:
  codes, *statistics = encoded
  narrow = [x[..., 0] if x.ndim else x for x in statistics]
  return Encoded(join_groups(codes, n), *narrow)
