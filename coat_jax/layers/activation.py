# SPDX-License-Identifier: Apache-2.0
"""Activation functions that save their inputs in FP8.

Each group of `recipe.group_size` values along the last axis has a scale. The
forward pass and the backward pass both compute with the dequantized values.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax import Array

from coat_jax import ops
from coat_jax.layers.module import check_float, recipe_of
from coat_jax.layers.operands import in_groups
from coat_jax.layers.residuals import residual_scope, save_residual
from coat_jax.layers.rule import rule
from coat_jax.ops.activation import check_activation
from coat_jax.recipes import CoatRecipe


def _fwd(*arguments):
  *parts, activation, recipe = arguments
  codes = tuple(in_groups(x, recipe) for x in parts)
  saved = save_residual("activation", codes)
  y = ops.activated(saved, activation=activation)
  return y.astype(parts[0].dtype), saved


def _bwd(activation, recipe, inputs, saved, g):
  del recipe, inputs
  gradients = ops.activation_bwd(g, saved, activation=activation)
  return tuple(dx.astype(g.dtype) for dx in gradients)


_activate = rule(_fwd, _bwd)


def activate(
  x: Array,
  up: Array | None = None,
  *,
  activation: ops.Activation,
  recipe: CoatRecipe | None = None,
) -> Array:
  """Computes f(x), or f(x) * up as in a SwiGLU MLP.

  Args:
    x: [..., F], BF16 or f32.
    up: an array of the same shape and dtype, or None.
    activation: f, one of "silu", "gelu" (exact, with erf), "gelu_tanh" (the
      tanh approximation, the default of `jax.nn.gelu`) and "gelu_quick"
      (x sigmoid(1.702 x), as in CLIP).
    recipe: if `recipe.nonlinear` is "fp8", x and up are quantized to FP8 and
      saved, and f is computed in f32. Otherwise f is computed in x's dtype.
      None means `recipes.coat()`.

  Returns:
    [..., F] in the inputs' dtype.

  Raises:
    TypeError: x or up is not a floating-point array, or `recipe` is not a
      CoatRecipe.
    ValueError: shapes or dtypes differ, or the activation is unknown.
  """
  recipe = recipe_of("activate", recipe)
  check_activation(activation)
  check_float("activate", "x", x)
  if up is not None:
    check_float("activate", "up", up)
    if x.shape != up.shape or x.dtype != up.dtype:
      raise ValueError(
        "activate: x and up must have the same shape and dtype, got "
        f"{x.shape} {x.dtype} and {up.shape} {up.dtype}; cast or reshape one"
      )
  parts = (x,) if up is None else (x, up)
  if recipe.nonlinear == "fp8":
    return _activate(parts, activation, recipe)
  return plain_activation(parts, activation)


def plain_activation(
  parts: Sequence[Array], activation: ops.Activation
) -> Array:
  """Computes f(x), or f(x) * up, in x's dtype; JAX differentiates it."""
  # Name the inputs as FP8 recipes do, for checkpoint policies.
  x, *others = save_residual("activation", tuple(parts))
  with residual_scope("activation"):
    y = _PLAIN[activation](x)
    return (y * others[0]).astype(x.dtype) if others else y


_PLAIN: dict[ops.Activation, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
