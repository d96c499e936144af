# SPDX-License-Identifier: Apache-2.0
"""A block's back: the middle, and the product that reads what it writes.

On a mesh the product is row-parallel over the tensor axis: each device
multiplies its own columns of whole sequences, and sums are scattered.
"""

from typing import Any, NamedTuple

from jax import Array, P

from coat_jax import ops
from coat_jax.layers.linear import (
  Linear,
  add_linear,
  bias_gradient,
  gradient_operand,
  scale_to_save,
)
from coat_jax.layers.mesh.collectives import gather_sequence
from coat_jax.layers.mesh.specs import cached, split_inputs
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import value_of
from coat_jax.layers.weight import quantized_weight, weight_gradient
from coat_jax.ops import Operand
from coat_jax.recipe import CoatRecipe, MeshAxes


class BackWeights(NamedTuple):
  """Parameters of a back; None where it has none.

  Attributes:
    w: [F, D].
    bias: [D].
    cache: of w, from `layers.cache_weight`.
  """

  w: Array
  bias: Array | None = None
  cache: Operand | None = None

  @classmethod
  def of(cls, linear: Linear) -> "BackWeights":
    """Those of a linear layer's module."""
    return cls(linear.kernel[...], value_of(linear.bias), linear.cache)


def back_specs(axes: MeshAxes, weights: BackWeights) -> BackWeights:
  """How a back's weights are sharded: row-parallel, the bias replicated."""
  rows: Any = split_inputs(axes)
  all_of_it: Any = P()
  return BackWeights(rows, all_of_it, cached(weights.cache, rows))


class BackSaved(NamedTuple):
  """What `back_forward` makes for its backward."""

  middle: Any
  w_scale: Operand | None


def back_forward(
  out: MiddleOutput,
  weights: BackWeights,
  recipe: CoatRecipe,
  *,
  like: Array,
  add: Array | None,
  after: Array | None = None,
) -> tuple[Array, BackSaved]:
  """The second product in `like`'s dtype, plus `add`; and what is saved."""
  w = weights
  after = after if out.after is None else out.after
  w_q = quantized_weight(w.w, w.cache, "columns", recipe, after=after)
  y = add_linear(out.operand, w_q, w.bias, recipe, dtype=like.dtype, add=add)
  return y, BackSaved(out.saved, scale_to_save(w.cache, w_q))


def back_backward(
  middle: Middle,
  middle_weights: Any,
  weights: BackWeights,
  saved: BackSaved,
  g: Array,
  recipe: CoatRecipe,
  *,
  has_bias: bool,
) -> tuple[MiddleGradient, BackWeights]:
  """Gradients of the middle's input and weights, and of the back's weights."""
  w = weights
  g_q = gather_sequence(gradient_operand(g, recipe), recipe, batch=g.shape[0])
  values, operand = middle.restore(saved.middle, g.dtype, recipe)
  dw = None
  if operand is not None:
    dw = weight_gradient(operand, g_q, w.w, recipe)
  w_q = quantized_weight(w.w, w.cache or saved.w_scale, "rows", recipe)
  dout = ops.linear_dgrad(
    g_q, w_q, dtype=g.dtype, implementation=recipe.implementation
  )
  gradient = middle.backward(
    values, dout, middle_weights, recipe, has_bias=has_bias
  )
  if dw is None:
    assert gradient.operand is not None  # See `MiddleGradient`.
    dw = weight_gradient(gradient.operand, g_q, w.w, recipe)
  dbias = bias_gradient(g, w.bias, recipe, has_columns=False)
  return gradient, BackWeights(dw, dbias)
