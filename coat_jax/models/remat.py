# SPDX-License-Identifier: Apache-2.0
"""Checkpoint policies of a decoder's layers, by the name of `Remat`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from coat_jax.layers import block_inputs_saveable
from coat_jax.layers.remat import codes_saveable, through_codes
from coat_jax.models.config import Remat
from coat_jax.numerics.checks import check_choice
from coat_jax.numerics.recipes import CoatRecipe


def _all_but_gathered(
  primitive, *arrays, call_jaxpr: Any = None, **options
) -> bool:
  """Checkpoint policy: keep what autodiff keeps, except other devices' rows.

  Those come from `gathering._constrained`; what is made of them before a
  product is a view. (A policy by `checkpoint_name` keeps the array before the
  name instead.)
  """
  del arrays, options
  names = {primitive.name}
  if primitive.name == "custom_vjp_call":
    names |= {equation.primitive.name for equation in call_jaxpr.eqns}
    names.discard("reshape")
  return not names & {"sharding_constraint", "reshape"}


_POLICIES = {
  "none": _all_but_gathered,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
  "fp8": block_inputs_saveable,
  "fp8_layer": codes_saveable,
}


def check_remat(remat: Remat, recipe: CoatRecipe) -> None:
  """Raises ValueError if layers of a recipe cannot keep what `remat` names."""
  check_choice("remat", "remat", remat, tuple(_POLICIES))
  if remat == "fp8" and recipe.nonlinear != "fp8":
    raise ValueError(
      "remat: 'fp8' keeps the FP8 inputs of norms, which recipe coat has, got "
      f"recipe {recipe.name}; pass 'fp8_layer', which rounds each layer's "
      "input, or 'full'"
    )


def checkpointed(
  forward: Callable, remat: Remat, recipe: CoatRecipe, *, is_gathering: bool
) -> Callable:
  """Returns a layer's forward that keeps what `remat` names for the backward.

  If `forward` gathers weights (`is_gathering`), the backward gathers those of
  other devices again. With "fp8_layer" the result rounds x first.
  """
  if remat == "none" and not is_gathering:
    return forward
  rounded = forward
  if remat == "fp8_layer":
    rounded = lambda x, *args: forward(through_codes(x, recipe), *args)  # noqa: E731
  # In a scan XLA cannot mistake the second forward for the first.
  return nnx.remat(rounded, prevent_cse=False, policy=_POLICIES[remat])
