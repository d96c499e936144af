# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention besides q, k and v, and the kinds of a stack's layers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, P

from coat_jax.numerics.recipes import MeshAxes
from coat_jax.ops import AttentionKind


class HeadsInputs(NamedTuple):
  """Inputs of attention besides q, k and v; they have no gradient.

  Attributes:
    segments: int32 [B, T], or None.
    kind: int32 scalar, the index into a tuple of kinds; None if there is only
      one.
  """

  segments: Array | None = None
  kind: Array | None = None


# One kind of layers, or a tuple for a stack with several.
type Kinds = AttentionKind | tuple[AttentionKind, ...]


def of_kind(run: Callable, kinds: Kinds, kind: Array | None) -> Callable:
  """Returns `run` for one kind, or a switch with one static kind per branch."""
  if isinstance(kinds, AttentionKind):
    return functools.partial(run, kind=kinds)
  branches = [functools.partial(run, kind=each) for each in kinds]
  return functools.partial(jax.lax.switch, kind, branches)


def heads_inputs_specs(axes: MeshAxes) -> Any:
  """Returns how `HeadsInputs` are sharded: segments like whole sequences."""
  of_segments: Any = P(axes.batch)
  of_kind: Any = P()
  return HeadsInputs(of_segments, of_kind)
