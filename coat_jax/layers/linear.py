# SPDX-License-Identifier: Apache-2.0
"""Linear layers with all three matmuls in FP8.

Activations and weights are quantized to E4M3, gradients to E5M2, per tensor or
in blocks, always just in time. Saved for the backward are x, as the E4M3 codes
that the forward multiplied, and the weight's scale; the weight is quantized
again from the parameter, which stays in memory anyway.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
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
  cached,
  columns_of,
  gather_sequence,
  gradient_operand,
  input_operand,
  value_scaling,
)
from coat_jax.layers.parameters import NO_METADATA, Metadata, make_param
from coat_jax.layers.residuals import (
  cotangent,
  residual_scope,
  save_residual,
)
from coat_jax.layers.rule import rule
from coat_jax.layers.weight import (
  as_matrix,
  quantized_weight,
  weight_gradient,
)
from coat_jax.mesh import (
  Split,
  own_columns,
  product_spec,
  run_whole,
  scatter_sequence,
  split_kernel,
  sum_tokens,
  tensor_size,
  tokens,
)
from coat_jax.numerics.checks import check_choice
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import Operand

_SPLITS = ("columns", "inputs", None)
default_kernel_init = nnx.initializers.lecun_normal()


class _Saved(NamedTuple):
  x: Operand  # See `input_operand`.
  w_scale: Operand | None


def _fp8_linear_fwd(x, w, bias, cache, split, recipe):
  x_q, kept = input_operand(x, recipe)
  if split == "columns":
    x_q = gather_sequence(x_q, recipe, batch=x.shape[0])
  w_q = quantized_weight(as_matrix(w), cache, "columns", recipe)
  if split == "inputs":
    y = add_linear(x_q, w_q, as_row(bias), recipe, dtype=x.dtype, add=None)
  else:
    y = ops.linear_fwd(
      x_q,
      w_q,
      dtype=x.dtype,
      bias=as_row(bias),
      implementation=recipe.implementation,
    )
  saved = _Saved(kept, scale_to_save(cache, w_q, recipe))
  return y.reshape(*y.shape[:-1], *w.shape[1:]), saved


def _fp8_linear_bwd(split, recipe, inputs, saved, g):
  w, bias, cache = inputs
  x_q = columns_of(saved.x, recipe)
  how = recipe.implementation
  # -1 fails for an empty batch.
  g = g.reshape(*g.shape[: g.ndim - w.ndim + 1], math.prod(w.shape[1:]))
  g_q = gradient_operand(g, recipe)
  batch = g.shape[0]
  if split == "columns":
    x_q = gather_sequence(x_q, recipe, batch=batch)
  if split == "inputs":
    g_q = gather_sequence(g_q, recipe, batch=batch)
  # Reshape in here: outside, the reshaped weight would be saved too.
  w_q = quantized_weight(as_matrix(w), cache or saved.w_scale, "rows", recipe)
  dx = ops.linear_dgrad(g_q, w_q, dtype=g.dtype, implementation=how)
  if split == "columns":
    dx = scatter_sequence(dx, recipe.axes)
  dw = weight_gradient(x_q, g_q, w, recipe, has_columns=split is not None)
  dbias = bias_gradient(g, bias, recipe, has_columns=split == "columns")
  return dx, dw, dbias, None


def _specs(x, w, bias, cache, split, recipe):
  del bias
  axes = recipe.axes
  kernel, each = split_kernel(axes, split, w.ndim), tokens(axes, x)
  x_spec, bias_spec, y_spec = {
    None: (each, P(), each),
    "columns": (each, P(*kernel[1:]), own_columns(axes, w.ndim + 1)),
    "inputs": (own_columns(axes, x.ndim), P(), each),
  }[split]
  return (x_spec, kernel, bias_spec, cached(cache, kernel)), y_spec


_fp8_linear = rule(
  _fp8_linear_fwd,
  _fp8_linear_bwd,
  _specs,
  reads=(1, 2, 3),
  result_spec=lambda x, w, *_: product_spec(x, w),
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
    return _fp8_linear((x, w, bias, cache), split, recipe)

  def plain(x, w, bias):
    # Not as a matrix: devices may split the last axis of [D, 2, F].
    with residual_scope("linear"):
      return add_bias(jnp.tensordot(x, w.astype(x.dtype), 1), bias)

  return run_whole(plain, x, w, bias, out_specs=product_spec(x, w))


def scale_to_save(
  cache: Operand | None, w: Operand, recipe: CoatRecipe
) -> Operand | None:
  """Returns the scale of a weight's operand for the backward; None if cached.

  Also None for tiles, whose scales are computed again. The backward reads
  `cache or scale_to_save(...)`: codes only if they are cached, because then
  they stay in memory anyway.
  """
  if cache is not None or not value_scaling(recipe).of_weights.saves_scale:
    return None
  return Operand(None, None, save_residual("linear", w.scale))


def as_row(bias: Array | None) -> Array | None:
  """Reshapes [*F] to [F]; None stays None."""
  return None if bias is None else bias.reshape(-1)


def add_bias(y: Array, bias: Array | None) -> Array:
  """Adds bias [*F] to y [..., *F] in f32; the result has y's dtype."""
  if bias is None:
    return y
  ones = (1,) * (y.ndim - bias.ndim)
  row = bias.astype(jnp.float32).reshape(ones + bias.shape)
  return (y.astype(jnp.float32) + row).astype(y.dtype)


def add_linear(
  x: Operand,
  w: Operand,
  bias: Array | None,
  recipe: CoatRecipe,
  *,
  dtype: DTypeLike,
  add: Array | None,
) -> Array:
  """Computes x w + bias + add in `dtype`, for the device's positions.

  x has rows: on a mesh, the device's columns of whole sequences. w has columns:
  on a mesh, the rows that belong to x's columns. The bias [D] is rounded to
  `dtype` if a device has the whole sum; `add` [..., D], the residual stream, is
  added in f32.
  """
  product = functools.partial(
    ops.linear_fwd, x, w, dtype=dtype, implementation=recipe.implementation
  )
  if tensor_size(recipe.axes) == 1:
    return product(add=add, bias=bias)
  y = product()
  y = scatter_sequence(y, recipe.axes)
  y = add_bias(y, bias)
  if add is None:
    return y
  return (add.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype)


def bias_gradient(
  g: Array | None,
  bias: Array | None,
  recipe: CoatRecipe,
  *,
  has_columns: bool,
  sums: Array | None = None,
) -> Array | None:
  """Sums g [..., F] over all tokens in f32; None without a bias.

  `has_columns` says that F is the device's own, for all positions. `sums`, f32
  [F], is the sum over the device's tokens if it is known.
  """
  if bias is None:
    return None
  total = sums
  if total is None:
    assert g is not None  # See `MiddleGradient`.
    total = jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - 1)))
  total = sum_tokens(total, recipe.axes, all_positions=has_columns)
  return cotangent(total, bias)


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
