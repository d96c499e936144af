# SPDX-License-Identifier: Apache-2.0
"""SiLU·mul (SwiGLU) and GELU that save their inputs in FP8, in 1 x G groups.

Nothing else is saved: SiLU and the product are elementwise and cheap to
recompute. As in all layers, forward and backward read the same values.
"""

import functools
from collections.abc import Callable

import jax
from jax import Array

from coat_jax import ops
from coat_jax.layers.module import check_float, recipe_of
from coat_jax.layers.operands import in_groups
from coat_jax.layers.residuals import residual_scope, save_residual
from coat_jax.layers.rule import rule
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops.functions import check_approximation


def _fp8_silu_mul_fwd(gate, up, recipe):
  codes = in_groups(gate, recipe), in_groups(up, recipe)
  gate_q, up_q = save_residual("activation", codes)
  product = ops.silu_values(gate_q.dequantize()) * up_q.dequantize()
  return product.astype(gate.dtype), (gate_q, up_q)


def _fp8_silu_mul_bwd(recipe, inputs, saved, g):
  del recipe, inputs
  dgate, dup = ops.gated_bwd(g, *saved, activation="silu")
  return dgate.astype(g.dtype), dup.astype(g.dtype)


_fp8_silu_mul = rule(_fp8_silu_mul_fwd, _fp8_silu_mul_bwd)


def silu_mul(
  gate: Array, up: Array, *, recipe: CoatRecipe | None = None
) -> Array:
  """silu(gate) * up, the activation of a SwiGLU MLP; computed in f32.

  Args:
    gate, up: [..., F] of the same shape and dtype, BF16 (or f32).
    recipe: gate and up are read and saved in FP8 if `recipe.nonlinear` is
      "fp8"; None for `recipes.coat()`.

  Returns:
    [..., F] in the inputs' dtype.

  Raises:
    TypeError: gate or up is not a floating-point array, or `recipe` is not a
      CoatRecipe.
    ValueError: shapes or dtypes differ.
  """
  recipe = recipe_of("silu_mul", recipe)
  check_float("silu_mul", "gate", gate)
  check_float("silu_mul", "up", up)
  if gate.shape != up.shape or gate.dtype != up.dtype:
    raise ValueError(
      "silu_mul: gate and up must have one shape and dtype, got "
      f"{gate.shape} {gate.dtype} and {up.shape} {up.dtype}; cast or reshape "
      "one"
    )
  if recipe.nonlinear == "fp8":
    return _fp8_silu_mul((gate, up), recipe)
  return plain_gated(gate, up, activation="silu")


def plain_gated(gate: Array, up: Array, *, activation: ops.Activation) -> Array:
  """Computes activation(gate) * up in their dtype, for plain autodiff."""
  # Named so that a checkpoint policy keeps the same arrays as with FP8.
  gate, up = save_residual("activation", (gate, up))
  with residual_scope("activation"):
    return (_PLAIN[activation](gate) * up).astype(gate.dtype)


_PLAIN: dict[ops.Activation, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def _fp8_gelu_fwd(x, approximate, recipe):
  x_q = save_residual("activation", in_groups(x, recipe))
  y = ops.gelu_values(x_q.dequantize(), approximate=approximate)
  return y.astype(x.dtype), x_q


def _fp8_gelu_bwd(approximate, recipe, inputs, x_q, g):
  del recipe, inputs
  dx = ops.gelu_bwd(g, x_q, approximate=approximate)
  return (dx.astype(g.dtype),)


_fp8_gelu = rule(_fp8_gelu_fwd, _fp8_gelu_bwd)


def gelu(
  x: Array,
  *,
  approximate: ops.Approximation = True,
  recipe: CoatRecipe | None = None,
) -> Array:
  """GELU; computed in f32.

  Args:
    x: [..., F], BF16 (or f32).
    approximate: the tanh formula (as `jax.nn.gelu` does by default), erf
      (False), or "sigmoid": x sigmoid(1.702 x), the quick GELU of CLIP.
    recipe: as for `silu_mul`.

  Returns:
    [..., F] in x's dtype.

  Raises:
    TypeError: x is not a floating-point array, or `recipe` is not a CoatRecipe.
    ValueError: the approximation is unknown.
  """
  recipe = recipe_of("gelu", recipe)
  check_float("gelu", "x", x)
  check_approximation(approximate)
  if recipe.nonlinear == "fp8":
    return _fp8_gelu((x,), approximate, recipe)
  x = save_residual("activation", x)
  with residual_scope("activation"):
    if approximate == "sigmoid":
      return x * jax.nn.sigmoid(1.702 * x)
    return jax.nn.gelu(x, approximate=approximate)
