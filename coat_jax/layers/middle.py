# SPDX-License-Identifier: Apache-2.0
"""The interface of a block's middle, the part between its two matmuls."""

import abc
from typing import Any, NamedTuple

from jax import Array, P

from coat_jax.ops import Operand
from coat_jax.recipes import CoatRecipe, MeshAxes


class MiddleOutput(NamedTuple):
  """The result of a middle's forward pass.

  Attributes:
    operand: the second matmul's operand, in row layout.
    saved: values for the backward pass, each passed through `save_residual`.
    after: on a mesh, if the second weight's scale is cached, devices gather the
      weight's FP8 codes only after they have computed this array. None stands
      for the scale of the first matmul's operand.
  """

  operand: Operand
  saved: Any
  after: Array | None = None


class MiddleGradient(NamedTuple):
  """The result of a middle's backward pass.

  Attributes:
    h: gradient of the middle's input, as `gradient_operand` returns it.
    operand: the second matmul's operand in column layout; None if
      `Middle.columns` returned it.
    values: the unquantized gradient of the middle's input, [..., F], or its f32
      sum over the device's tokens, [F]; may be None if `has_bias` is False.
    weights: gradients of the middle's weights.
  """

  h: Any
  operand: Operand | None = None
  values: Array | None = None
  weights: Any = None


class Middle(abc.ABC):
  """The part between a block's two matmuls.

  Subclasses are frozen dataclasses without arrays, because a middle is a static
  argument and must be hashable. Arrays are passed as `weights` or, if they get
  no gradient, as `inputs` (such as positions).
  """

  def check(self, x: Array, weights: Any, inputs: Any, recipe: CoatRecipe):
    """Raises if these arguments of `layers.block` do not fit this middle."""
    del x, weights, inputs, recipe

  @abc.abstractmethod
  def plain(
    self, h: Any, weights: Any, inputs: Any, recipe: CoatRecipe
  ) -> Array:
    """Computes the second matmul's input from h [..., *F], in h's dtype.

    Used for recipes with nonlinear="bf16".
    """

  @abc.abstractmethod
  def forward(
    self, h: Any, weights: Any, inputs: Any, recipe: CoatRecipe
  ) -> MiddleOutput:
    """Computes the second matmul's operand; h is flattened to [..., F]."""

  def columns(self, saved: Any, recipe: CoatRecipe) -> Operand | None:
    """Returns the second matmul's operand in column layout, from `saved`.

    Returns None if `backward` returns this operand instead.
    """
    del saved, recipe

  @abc.abstractmethod
  def backward(
    self,
    saved: Any,
    dout: Array,
    weights: Any,
    recipe: CoatRecipe,
    *,
    has_bias: bool,
  ) -> MiddleGradient:
    """Computes the gradient of h from dout, the gradient of the operand.

    `saved` comes from `forward`. With `has_bias`, the block computes the
    gradient of the first matmul's bias from `MiddleGradient.values`.
    """

  def specs(self, axes: MeshAxes, weights: Any, inputs: Any) -> tuple[Any, Any]:
    """Returns the specs of weights and inputs; replicated by default."""
    del axes, weights, inputs
    return P(), P()
