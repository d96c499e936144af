# SPDX-License-Identifier: Apache-2.0
"""What is between a block's two products: the one part that is not shared.

A new kind of block is a `Middle`: `layers.mlp` and `layers.attention` have the
ones that are here.
"""

import abc
from typing import Any, NamedTuple

from jax import Array, P

from coat_jax.ops import Operand
from coat_jax.recipe import CoatRecipe, MeshAxes


class MiddleOutput(NamedTuple):
  """What a middle's forward returns.

  Attributes:
    operand: of the second product, its rows.
    saved: for the backward, each array through `save_residual`.
    after: on a mesh, the value that the second weight's codes wait for where
      its scale is cached (see `quantized_weight`); None for the front's scale.
  """

  operand: Operand
  saved: Any
  after: Array | None = None


class MiddleGradient(NamedTuple):
  """What a middle's backward returns.

  Attributes:
    h: gradient of the middle's input, as `gradient_operand` gives it.
    operand: columns of the second product's operand, computed again; None where
      `restore` gave them.
    values: gradient of the middle's input before it is rounded, if asked for.
    weights: gradients of the middle's own weights.
    sums: of `values` over all tokens, f32 [*F], in place of them.
  """

  h: Any
  operand: Operand | None = None
  values: Array | None = None
  weights: Any = None
  sums: Array | None = None


class Middle(abc.ABC):
  """What is between a block's two products: a frozen, hashable dataclass.

  A static argument of the block's rule, so it holds no arrays: its `weights`
  come with the block's, and `inputs` are arrays without a gradient (positions).
  """

  @abc.abstractmethod
  def plain(
    self, h: Any, weights: Any, inputs: Any, recipe: CoatRecipe
  ) -> Array:
    """In h's dtype, for recipes whose nonlinear operations are not FP8.

    Args:
      h: [..., *F], the first product.
      weights, inputs: the middle's own.
      recipe: as of the block.

    Returns:
      [..., F], what the second product reads.
    """

  @abc.abstractmethod
  def forward(
    self, h: Any, weights: Any, inputs: Any, recipe: CoatRecipe
  ) -> MiddleOutput:
    """From h [..., F] to the operand of the second product."""

  def restore(
    self, saved: Any, dtype: Any, recipe: CoatRecipe
  ) -> tuple[Any, Operand | None]:
    """What `backward` reads of `saved`, floats in `dtype`.

    And columns of the second product's operand, where they need no gradient: a
    weight's gradient is then computed before `backward` runs.
    """
    del dtype, recipe
    return saved, None

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
    """From the gradient of the second product's input to that of h.

    Args:
      saved: from `restore`.
      dout: [..., F].
      weights: the middle's own.
      recipe: as of the block.
      has_bias: whether the front has a bias, whose gradient is
        `MiddleGradient.sums`, or where that is None the sum of its `values`.
    """

  def specs(self, axes: MeshAxes, weights: Any, inputs: Any) -> tuple[Any, Any]:
    """How its weights and inputs are sharded; here, replicated."""
    del axes, weights, inputs
    return P(), P()
