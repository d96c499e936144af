# SPDX-License-Identifier: Apache-2.0
"""Linear layers with all three matmuls in FP8.

Activations and weights are quantized to E4M3, gradients to E5M2, per tensor or
in blocks, always just in time. Saved for the backward are x, as the E4M3 codes
that the forward multiplied, and the weight's scale; the weight is quantized
again from the parameter, which stays in memory anyway.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.layers.module import (
  RecipeModule,
  Sharding,
  check_float,
  check_recipe,
  reshard,
  sizes_of,
  value_of,
)
from coat_jax.layers.operands import (
  columns_of,
  gather_sequence,
  gradient_operand,
  input_operand,
)
from coat_jax.layers.parameters import NO_METADATA, Metadata, make_param
from coat_jax.layers.product import (
  LinearWeights,
  add_bias,
  bias_gradient,
  input_gradient,
  multiply,
  weights_specs,
)
from coat_jax.layers.residuals import residual_scope
from coat_jax.layers.rule import rule
from coat_jax.layers.weight import weight_gradient
from coat_jax.mesh import (
  Split,
  own_columns,
  product_spec,
  run_whole,
  scatter_sequence,
  tokens,
)
from coat_jax.numerics.checks import check_choice
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import Operand

_SPLITS = ("columns", "inputs", None)
default_kernel_init = nnx.initializers.lecun_normal()


class _Saved(NamedTuple):
  x: Operand  # See `input_operand`.
  w_scale: Operand | None  # See `multiply`.


def _fwd(x, weights, split, recipe):
  x_q, kept = input_operand(x, recipe)
  if split == "columns":
    x_q = gather_sequence(x_q, recipe, batch=x.shape[0])
  y, w_scale = multiply(x_q, weights, split, recipe, dtype=x.dtype)
  y = y.reshape(*y.shape[:-1], *weights.w.shape[1:])
  return y, _Saved(kept, w_scale)


def _bwd(split, recipe, inputs, saved, g):
  (weights,) = inputs
  w, x_q = weights.w, columns_of(saved.x, recipe)
  # -1 fails for an empty batch.
  g = g.reshape(*g.shape[: g.ndim - w.ndim + 1], math.prod(w.shape[1:]))
  g_q = gradient_operand(g, recipe)
  batch = g.shape[0]
  if split == "columns":
    x_q = gather_sequence(x_q, recipe, batch=batch)
  if split == "inputs":
    g_q = gather_sequence(g_q, recipe, batch=batch)
  dx = input_gradient(g_q, weights, saved.w_scale, recipe, g.dtype)
  if split == "columns":
    dx = scatter_sequence(dx, recipe.axes)
  dw = weight_gradient(x_q, g_q, w, recipe, has_columns=split is not None)
  has_columns = split == "columns"
  dbias = bias_gradient(g, weights.bias, recipe, has_columns=has_columns)
  return dx, LinearWeights(dw, dbias)


def _specs(x, weights, split, recipe):
  axes, each = recipe.axes, tokens(recipe.axes, x)
  x_spec = own_columns(axes, x.ndim) if split == "inputs" else each
  y_spec = own_columns(axes, weights.w.ndim + 1) if split == "columns" else each
  return (x_spec, weights_specs(axes, weights, split)), y_spec


_fp8_linear = rule(
  _fwd,
  _bwd,
  _specs,
  reads=(1,),
  result_spec=lambda x, weights: product_spec(x, weights.w),
)


def linear(
  x: Array,
  w: Array,
  bias: Array | None = None,
  *,
  recipe: CoatRecipe,
  cache: Operand | None = None,
  split: Split = None,
) -> Array:
  """Computes y = x w + bias, in FP8 or in x's dtype, according to the recipe.

  Args:
    x: [..., D], BF16 (or f32).
    w: [D, *F], any float dtype; gradients come back in it.
    bias: [*F] or None, added in f32; with FP8 products it is first rounded to
      x's dtype.
    recipe: `recipe.linear` selects how it is computed.
    cache: cache of w, from `layers.cache_weight`, or None.
    split: how w is split over a mesh's tensor axis if x is [B, T, D]:
      "columns", "inputs" (rows), or None; products that are not FP8 are left to
      XLA.

  Returns:
    [..., *F] in x's dtype.

  Raises:
    TypeError: x is not a floating-point array, or `recipe` is not a CoatRecipe.
    ValueError: x's last axis is not w's first; the bias has other columns than
      w, or `split` is unknown.
  """
  check_recipe("linear", recipe)
  check_float("linear", "x", x)
  check_float("linear", "w", w, ndim=range(2, 65))
  check_choice("linear", "split", split, _SPLITS)
  # On a mesh, a caller's own shard_map has other shards of either.
  if not recipe.axes and x.shape[-1] != w.shape[0]:
    raise ValueError(
      f"linear: x [..., D] needs a weight [D, F], got x {x.shape} and weight "
      f"{w.shape}; pass x of the weight's width"
    )
  if bias is not None and bias.shape != w.shape[1:]:
    raise ValueError(
      f"linear: bias must be of the product's columns, {w.shape[1:]}, got "
      f"{bias.shape}; pass weights that belong together"
    )
  if recipe.linear == "fp8":
    if recipe.axes is not None and split is not None and x.ndim != 3:
      # Devices along tensor have no axis of positions to split. Cached codes of
      # several axes of columns are in the order of devices.
      split, cache = None, cache and Operand(None, None, cache.scale)
    weights = LinearWeights(w, bias, cache=cache)
    return _fp8_linear((x, weights), split, recipe)

  def plain(x, w, bias):
    # Not as a matrix: devices may split the last axis of [D, 2, F].
    with residual_scope("linear"):
      return add_bias(jnp.tensordot(x, w.astype(x.dtype), 1), bias)

  return run_whole(plain, x, w, bias, out_specs=product_spec(x, w))


class Linear(RecipeModule):
  """y = x kernel + bias; a drop-in replacement for `nnx.Linear`.

  It also replaces an `nnx.LinearGeneral` over the last axis of its input.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import Linear
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> layer = Linear(64, (2, 96), recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 2, 96)
    >>> layer.kernel.shape
    (64, 2, 96)

  Attributes:
    in_features, out_features: the constructor's arguments.
    kernel: [in_features, *out_features]; the axes of layers that are stacked
      for a scan come first.
    bias: [*out_features] or None.
    weight_ndim: rank of one layer's kernel.
    split: how the kernel is split over a mesh's tensor axis.
    cache: cache of the kernel; None except in a copy by `with_weight_cache`.
  """

  def __init__(
    self,
    in_features: int,
    out_features: int | tuple[int, ...],
    *,
    recipe: CoatRecipe | None = None,
    use_bias: bool = True,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer = default_kernel_init,
    bias_init: nnx.Initializer | None = None,
    kernel_metadata: Metadata = NO_METADATA,
    bias_metadata: Metadata = NO_METADATA,
    split: Split = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters.

    Args:
      in_features: D, width of the input.
      out_features: width of the output, or the shape [*F] of its last axes.
      recipe: whether the products are FP8; None for `recipes.coat()`.
      use_bias: whether there is a bias [*F].
      dtype: dtype of input and output; None promotes the input and the
        parameters, as in flax.
      param_dtype: dtype of the parameters and their gradients.
      kernel_init: initializer of the kernel, called with [D, F] of all columns.
      bias_init: initializer of the bias, called with [F] of all columns; None
        for zeros, which consume no PRNG key.
      kernel_metadata: metadata of the kernel, such as `out_sharding`.
      bias_metadata: metadata of the bias.
      split: on a mesh with a tensor axis: "columns" for a column-parallel
        kernel, "inputs" for a row-parallel one, None for a replicated one.
      rngs: its stream `params` initializes the parameters.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is below 1, or `split` is unknown.
    """
    super().__init__(recipe, dtype, param_dtype, rngs, in_features=in_features)
    self.in_features, self.out_features = in_features, out_features
    self.use_bias, self.param_dtype = use_bias, param_dtype
    self.split: Split = split
    check_choice("Linear", "split", split, _SPLITS)
    columns = sizes_of("Linear", "out_features", out_features)
    # Initialized as a matrix, so that the fan-in and fan-out are the product's.
    self.kernel = make_param(
      kernel_init,
      rngs,
      (in_features, *columns),
      param_dtype,
      kernel_metadata,
      drawn=(in_features, math.prod(columns)),
    )
    self.weight_ndim = 1 + len(columns)
    self.cache: Operand | None = nnx.data(None)
    self.bias = nnx.data(None)
    if use_bias:
      drawn = (math.prod(columns),)
      self.bias = make_param(
        bias_init, rngs, columns, param_dtype, bias_metadata, drawn=drawn
      )

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Multiplies the last axis.

    Args:
      x: [..., in_features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., *out_features] in `dtype`.
    """
    y = linear(
      self.cast(x, self.kernel, self.bias),
      self.kernel[...],
      value_of(self.bias),
      recipe=self.active_recipe,
      cache=self.cache,
      split=self.split,
    )
    return reshard(y, out_sharding)
