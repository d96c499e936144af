# SPDX-License-Identifier: Apache-2.0
"""What every module here has: a recipe, and another one for evaluation."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.recipe import CoatRecipe


class RecipeModule(nnx.Module):
  """Base of all modules: holds the recipe and the compute dtype.

  Attributes:
    recipe: what training computes and saves for the backward pass.
    dtype: dtype of inputs and outputs.
    deterministic: set by `module.eval()` and `module.train()`; evaluation uses
      `recipe.for_evaluation()`.
  """

  def __init__(self, recipe: CoatRecipe, dtype: DTypeLike):
    """Sets what all modules have.

    Args:
      recipe: what training computes and saves.
      dtype: of inputs and outputs.

    Raises:
      TypeError: `recipe` is not a CoatRecipe, such as a preset not called.
    """
    if not isinstance(recipe, CoatRecipe):
      raise TypeError(
        f"{type(self).__name__}: recipe must be a CoatRecipe, got "
        f"{type(recipe).__name__}; call it, as in recipe.coat()"
      )
    self.recipe = recipe
    self.dtype = dtype
    self.deterministic = False

  @property
  def active_recipe(self) -> CoatRecipe:
    """The recipe for what the module does now: training or evaluation."""
    return self.recipe.for_evaluation() if self.deterministic else self.recipe


def value_of(param: nnx.Param | None) -> Array | None:
  """A parameter's array, or None."""
  return None if param is None else param[...]


def rows_to_batch(x: Array) -> Array:
  """[..., T, D] to [B, T, D], leading axes taken together."""
  return jnp.reshape(x, (-1, *x.shape[-2:]))
