# SPDX-License-Identifier: Apache-2.0
"""Makes an FP8 layer from one of Flax's layers, with the same parameters."""

import inspect
from typing import Any

from flax import nnx

from coat_jax.layers.linear import Linear
from coat_jax.layers.module import RecipeModule
from coat_jax.layers.norm import LayerNorm, RMSNorm
from coat_jax.numerics.recipes import CoatRecipe

COUNTERPARTS: dict[type, type[RecipeModule]] = {
  nnx.Linear: Linear,
  nnx.LinearGeneral: Linear,
  nnx.RMSNorm: RMSNorm,
  nnx.LayerNorm: LayerNorm,
}
_PARAMETERS = ("kernel", "scale", "bias")
# `use_fast_variance` has no effect: our norms always use the accurate formula.
_IGNORED = {"self", "rngs", "use_fast_variance"}


def convert_layer(module: Any, recipe: CoatRecipe) -> RecipeModule:
  """Makes our layer from one of flax's, with the same parameters.

  Raises a ValueError, with a reason, if the layer was made with an argument
  that ours does not support.
  """
  kind = type(module)
  for name, value in vars(module).items():
    if isinstance(value, nnx.Pytree | nnx.Variable) and name not in _PARAMETERS:
      raise ValueError(
        f"{kind.__name__}: it holds `{name}`, which the FP8 layer would lose"
      )
  parameters = inspect.signature(kind.__init__).parameters
  options = {x: getattr(module, x) for x in parameters if hasattr(module, x)}
  new_kind: Any = COUNTERPARTS[kind]
  if kind is nnx.LinearGeneral:
    axes = options.pop("axis")
    if axes != tuple(range(-len(axes), 0)):
      raise _refused(kind, "axis", axes)
    if len(axes) == 1:
      (options["in_features"],) = module.in_features
  ours = inspect.signature(new_kind.__init__).parameters
  for name in options.keys() - ours.keys() - _IGNORED:
    value = options[name]
    if value is not (default := parameters[name].default) and value != default:
      raise _refused(kind, name, value)
  options = {k: v for k, v in options.items() if k in ours and k != "rngs"}
  make = lambda: new_kind(recipe=recipe, **options, rngs=nnx.Rngs(0))  # noqa: E731
  new = nnx.eval_shape(make)
  for name in _PARAMETERS:
    if (param := getattr(module, name, None)) is None:
      continue
    shape = getattr(new, name).shape
    if param.shape[len(param.shape) - len(shape) :] != shape:
      raise ValueError(
        f"{kind.__name__}: {name} must be {shape} after axes of stacked "
        f"layers, got {param.shape}; stack layers along the first axis"
      )
    setattr(new, name, param)
  return new


def _refused(kind: type, name: str, value: Any) -> ValueError:
  return ValueError(
    f"{kind.__name__}: {name} must be left out, got {value!r}: the FP8 layer "
    "does not support it"
  )
