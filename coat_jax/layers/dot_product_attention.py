# SPDX-License-Identifier: Apache-2.0
"""Attention that saves q, k, v, its output and the log-sum-exp.

The saved output is never rounded to FP8. If it were, the gradients of a query's
scores would not sum to 0, and the log-sum-exp would grow until training
diverges (docs/stability.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, P

from coat_jax import ops
from coat_jax.layers.module import check_float, recipe_of
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rope import positions_spec
from coat_jax.layers.rule import rule
from coat_jax.mesh import own_heads
from coat_jax.ops import AttentionKind, AttentionResiduals
from coat_jax.recipes import CoatRecipe, MeshAxes

# The kind that all layers of a stack share, or a tuple of the stack's kinds.
type Kinds = AttentionKind | tuple[AttentionKind, ...]


class AttentionInputs(NamedTuple):
  """Inputs of attention that have no gradient.

  Attributes:
    positions: int32 [T], or [B, T] if they differ between sequences; None if
      the caller applies RoPE.
    segments: int32 [B, T]; a query sees only keys of its own segment. None for
      one segment.
    kind: int32 scalar, the index of the layer's kind; None if all layers have
      the same kind.
  """

  positions: Array | None
  segments: Array | None = None
  kind: Array | None = None


def inputs_specs(axes: MeshAxes, inputs: AttentionInputs) -> Any:
  """Returns the specs of inputs, which are split over the batch only."""
  positions: Any = P()
  if inputs.positions is not None:
    positions = positions_spec(axes, inputs.positions)
  segments: Any = P(axes.batch)
  kind: Any = P()
  return AttentionInputs(positions, segments, kind)


def attend(
  heads: Sequence[Array],
  inputs: AttentionInputs,
  kinds: Kinds,
  recipe: CoatRecipe,
) -> AttentionResiduals:
  """Runs attention on q, k and v, and names the results as residuals."""
  run = functools.partial(
    ops.attention_fwd, implementation=recipe.implementation
  )
  kept = _of_kind(run, kinds, inputs)(*heads, inputs.segments)
  return save_residual("attention", kept)


def attend_backward(
  dout: Array,
  heads: Sequence[Array],
  kept: AttentionResiduals,
  inputs: AttentionInputs,
  kinds: Kinds,
  recipe: CoatRecipe,
) -> tuple[Array, Array, Array]:
  """Computes dq, dk and dv; `kept` is what `attend` returned for `heads`."""
  run = functools.partial(
    ops.attention_bwd, implementation=recipe.implementation
  )
  return _of_kind(run, kinds, inputs)(dout, *heads, kept, inputs.segments)


def _of_kind(run: Callable, kinds: Kinds, inputs: AttentionInputs) -> Callable:
  """Binds `run` to the layer's kind, using a switch if there are several."""
  if isinstance(kinds, AttentionKind):
    return functools.partial(run, kind=kinds)
  branches = [functools.partial(run, kind=each) for each in kinds]
  return functools.partial(jax.lax.switch, inputs.kind, branches)


def _fwd(q, k, v, inputs, kinds, recipe):
  heads = save_residual("attention", (q, k, v))
  kept = attend(heads, inputs, kinds, recipe)
  return kept.out, (heads, kept)


def _bwd(kinds, recipe, inputs, saved, g):
  (inputs,), (heads, kept) = inputs, saved
  return *attend_backward(g, heads, kept, inputs, kinds, recipe), None


def _specs(q, k, v, inputs, kinds, recipe):
  del q, k, v, kinds
  heads = own_heads(recipe.axes)
  return (heads, heads, heads, inputs_specs(recipe.axes, inputs)), heads


attention_rule = rule(_fwd, _bwd, _specs, reads=(3,))


def dot_product_attention(
  q: Array,
  k: Array,
  v: Array,
  *,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  segments: Array | None = None,
  recipe: CoatRecipe | None = None,
) -> Array:
  """Computes softmax(q k^T / sqrt(H)) v.

  Saves q, k, v, the output and the log-sum-exp for the backward pass.

  Example usage, with packed documents of three and five tokens, where a query
  sees up to three keys::

    >>> from coat_jax.layers import dot_product_attention
    >>> import jax.numpy as jnp

    >>> q, kv = jnp.ones((1, 8, 4, 16)), jnp.ones((1, 8, 2, 16))
    >>> documents = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    >>> dot_product_attention(
    ...   q, kv, kv, window=3, soft_cap=50.0, segments=documents
    ... ).shape
    (1, 8, 4, 16)

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H], N a multiple of K.
    causal: whether query t sees only keys up to t + S - T. Requires S >= T.
    window: number of keys that a query sees, counted back from its own
      position (`sliding_window` in Hugging Face Transformers); None for all.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them
      unchanged.
    scale: q k^T is multiplied by this number; None for 1 / sqrt(H).
    segments: segment ids, int32 [B, T], for packed documents or padding; a
      query sees only keys of its own segment. Requires S = T. None for one
      segment.
    recipe: selects the implementation and the mesh axes; None for the default
      implementation and no mesh axes.

  Returns:
    [B, T, N, H] in q's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes are inconsistent; `window` is below 1 or set without
      `causal`; `soft_cap` or `scale` is not finite and above 0.
  """
  op = "dot_product_attention"
  recipe = recipe_of(op, recipe)
  for name, x in dict(q=q, k=k, v=v).items():
    check_float(op, name, x, ndim=4)
  kind = AttentionKind(causal, window, soft_cap, scale)
  inputs = AttentionInputs(None, segments)
  return attention_rule((q, k, v, inputs), kind, recipe)
