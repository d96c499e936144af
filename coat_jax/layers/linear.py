# SPDX-License-Identifier: Apache-2.0
"""Linear layers that multiply in FP8, alone or fused with a norm."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.front import FrontStatic, front_rule
from coat_jax.layers.module import (
  CacheableWeight,
  RecipeModule,
  Sharding,
  check_float,
  check_recipe,
  reshard,
  sizes_of,
  value_of,
)
from coat_jax.layers.norm import norm
from coat_jax.layers.parameters import NO_METADATA, Metadata, make_param
from coat_jax.layers.product import LinearWeights, add_bias, cache_weight
from coat_jax.layers.residuals import residual_scope
from coat_jax.mesh import Split, product_spec, run_whole, split_kernel
from coat_jax.numerics.checks import check_choice, check_flags, check_kind
from coat_jax.ops import Operand
from coat_jax.recipes import CoatRecipe

_SPLITS = ("columns", "inputs", None)
default_kernel_init = nnx.initializers.lecun_normal()


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
    w: [D, *F], any float dtype; its gradient has the same dtype.
    bias: [*F] or None, added in f32; FP8 matmuls may round it to x's dtype.
    recipe: `recipe.linear` selects how y is computed.
    cache: the result of `layers.cache_weight` for w, or None.
    split: how w is split over a mesh's tensor axis if x is [B, T, D]:
      "columns", "inputs" (rows), or None for no split. This affects only FP8
      matmuls; XLA partitions all other matmuls.

  Returns:
    [..., *F] in x's dtype.

  Raises:
    TypeError: x or w is not a float array, or `recipe` is not a CoatRecipe.
    ValueError: shapes are inconsistent, or `split` is unknown.
  """
  check_recipe("linear", recipe)
  check_float("linear", "x", x)
  check_float("linear", "w", w, ndim=range(2, 65))
  check_choice("linear", "split", split, _SPLITS)
  # With mesh axes, the caller may run this in shard_map, where w is a shard.
  if not recipe.axes and x.shape[-1] != w.shape[0]:
    raise ValueError(
      f"linear: x [..., D] needs a weight [D, F], got x {x.shape} and weight "
      f"{w.shape}; pass an x whose last dimension is D"
    )
  if bias is not None and bias.shape != w.shape[1:]:
    raise ValueError(
      f"linear: bias must have the shape {w.shape[1:]} for this weight, got "
      f"{bias.shape}; pass the bias of this weight"
    )
  if recipe.linear == "fp8":
    if recipe.axes is not None and split is not None and x.ndim != 3:
      # w is split over the mesh's tensor axis only if x is [B, T, D]. Keep only
      # the cached scale here: for a weight [D, 2, F], the columns of the cached
      # codes are sorted by device, so only a split matmul can use them.
      split, cache = None, cache and Operand(None, None, cache.scale)
    weights = LinearWeights(w, bias, cache=cache)
    return front_rule((x, weights), FrontStatic(split=split), recipe)

  def plain(x, w, bias):
    # Keep w's shape, because devices may split the last dimension of [D, 2, F].
    with residual_scope("linear"):
      return add_bias(jnp.tensordot(x, w.astype(x.dtype), 1), bias)

  return run_whole(plain, x, w, bias, out_specs=product_spec(x, w))


def norm_linear(
  x: Array,
  weights: LinearWeights,
  *,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
) -> Array:
  """Computes norm(x) w + bias.

  Args:
    x: [..., D], BF16 (or f32).
    weights: see `LinearWeights`; w is [D, *F].
    kind: "rms" or "layer"; None for no norm.
    eps: epsilon of the norm.
    recipe: if `recipe.nonlinear` is "fp8", norm and matmul share one custom
      gradient, and the norm writes the matmul's FP8 operand.

  Returns:
    [..., *F] in x's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: shapes are inconsistent, the kind is unknown or `eps` is
      negative.
  """
  op = "norm_linear"
  check_recipe(op, recipe)
  check_float(op, "x", x)
  remedy = "pass one, as in LinearWeights(w, gamma=gamma)"
  check_kind(op, "weights", weights, LinearWeights, remedy)
  if kind is not None and recipe.nonlinear == "fp8":
    return front_rule((x, weights), FrontStatic(kind, eps), recipe)
  w, y = weights, x
  if kind is not None:
    y = norm(x, w.gamma, w.beta, kind=kind, eps=eps, recipe=recipe)
  return linear(y, w.w, w.bias, recipe=recipe, cache=w.cache, split="columns")


class Linear(RecipeModule):
  """y = x kernel + bias; a drop-in replacement for `nnx.Linear`.

  It also replaces an `nnx.LinearGeneral` that contracts the last axes.

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
    kernel: [*in_features, *out_features]. If layers are stacked for a scan, the
      axes of the stack come first.
    bias: [*out_features] or None.
    weight_ndim: rank of one layer's `weight`.
    split: how the kernel is split over a mesh's tensor axis.
    cache: the result of `cache_weight` for the kernel; None except in a copy
      from `with_weight_cache`.
  """

  def __init__(
    self,
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    *,
    recipe: CoatRecipe | None = None,
    use_bias: bool = True,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer | None = None,
    bias_init: nnx.Initializer | None = None,
    kernel_metadata: Metadata = NO_METADATA,
    bias_metadata: Metadata = NO_METADATA,
    split: Split = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters.

    Args:
      in_features: D, width of the input, or the shape of its last axes.
      out_features: width of the output, or the shape [*F] of its last axes.
      recipe: selects whether matmuls run in FP8; None for `recipes.coat()`.
      use_bias: whether there is a bias [*F].
      dtype: dtype of input and output; None for the common dtype of input and
        parameters, as in flax.
      param_dtype: dtype of the parameters and their gradients.
      kernel_init: initializer of the kernel, called with a matrix shape [D, F];
        None for the initializer of `nnx.Linear`.
      bias_init: initializer of the bias, called with the shape [F]; None for
        zeros, which consume no PRNG key.
      kernel_metadata: metadata of the kernel, such as `out_sharding`.
      bias_metadata: metadata of the bias.
      split: how the kernel is split over a mesh's tensor axis: "columns" if it
        is column-parallel, "inputs" if it is row-parallel, None for no split.
      rngs: its `params` stream provides the keys for initializers.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is below 1, or `split` is unknown.
    """
    super().__init__(
      recipe=recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.in_features, self.out_features = in_features, out_features
    self.use_bias, self.param_dtype = use_bias, param_dtype
    self.split: Split = split
    check_flags("Linear", use_bias=use_bias)
    check_choice("Linear", "split", split, _SPLITS)
    rows = sizes_of("Linear", "in_features", in_features)
    columns = sizes_of("Linear", "out_features", out_features)
    # Initialize the kernel as a matrix, so that initializers see the matmul's
    # fan-in and fan-out.
    drawn = math.prod(rows), math.prod(columns)
    self.kernel = make_param(
      kernel_init or default_kernel_init,
      rngs,
      rows + columns,
      param_dtype,
      kernel_metadata,
      drawn=drawn,
    )
    self._in_ndim, self.weight_ndim = len(rows), 1 + len(columns)
    self.cache: Operand | None = nnx.data(None)
    self.bias = nnx.data(None)
    if use_bias:
      self.bias = make_param(
        bias_init, rngs, columns, param_dtype, bias_metadata, drawn=drawn[1:]
      )

  def cacheable_weights(self) -> dict[str, CacheableWeight]:
    """Returns the kernel, keyed by the attribute name of its cache."""
    axes, ndim = self.active_recipe.axes, self.weight_ndim
    spec = None if axes is None else split_kernel(axes, self.split, ndim)
    return {"cache": CacheableWeight(self.weight, ndim, cache_weight, spec)}

  @property
  def weight(self) -> Array:
    """The kernel with its input axes merged, [D, *out_features]."""
    w = self.kernel[...]
    if self._in_ndim == 1:
      return w
    columns = w.ndim - self.weight_ndim + 1
    stack = w.shape[: columns - self._in_ndim]
    return w.reshape(*stack, -1, *w.shape[columns:])

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Contracts the last axes of x with the kernel, and adds the bias.

    Args:
      x: [..., *in_features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., *out_features] in `dtype`.
    """
    x = self.cast(x, self.kernel, self.bias)
    if self._in_ndim > 1:
      # Don't use reshape(..., -1), which fails for an empty batch.
      rows, features = x.shape[: -self._in_ndim], x.shape[-self._in_ndim :]
      x = x.reshape(*rows, math.prod(features))
    y = linear(
      x,
      self.weight,
      value_of(self.bias),
      recipe=self.active_recipe,
      cache=self.cache,
      split=self.split,
    )
    return reshard(y, out_sharding)
