# SPDX-License-Identifier: Apache-2.0
"""Constructor options of blocks, and the parts built from them."""

import types
from collections.abc import Collection, Mapping
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.block import BlockWeights
from coat_jax.layers.linear import Linear, norm_linear
from coat_jax.layers.module import RecipeModule, Sharding, reshard
from coat_jax.layers.norm import Norm, make_norm, norm_options
from coat_jax.layers.parameters import NO_METADATA, Metadata, stack_options
from coat_jax.layers.product import LinearWeights
from coat_jax.numerics.checks import check_flags
from coat_jax.recipes import CoatRecipe


class NormLinearOptions(TypedDict, total=False):
  """Options of `NormLinear` and `MoE`; `BlockOptions` extends them.

  Initializers are called with a key, a shape and a dtype; metadata is passed to
  `nnx.Param`. By default, biases start at 0 and the scales of norms at 1 (at 0
  with `scale_plus_one`); no PRNG key is consumed for them.

  Attributes:
    recipe: selects what is computed and saved in FP8; `recipes.coat()` by
      default.
    norm: norm of the input, "rms" (the default) or "layer"; None for no norm.
    epsilon: added to the mean square or the variance in norms, 1e-6 by default.
    use_scale: whether norms have a scale [D], True by default.
    scale_plus_one: whether norms, including the norms of q and k, multiply by
      1 + scale, as in Gemma; False by default.
    use_norm_bias: whether norms have a bias [D], False by default.
    dtype: dtype of input, output and activations that are not FP8, bfloat16 by
      default; None for the common dtype of input and parameters.
    param_dtype: dtype of the parameters and their gradients, float32 by
      default.
    kernel_init: initializer of the kernel, called with a matrix shape [D, F];
      by default the initializer of `nnx.Linear`. `MoE` calls it with a shape
      that starts with the number of experts, and has a different default.
    kernel_metadata: metadata of the kernel, such as `out_sharding`.
    bias_init, bias_metadata: initializer and metadata of the bias that is added
      after the matmul. `MoE` has no bias and does not accept these options.
    scale_init, scale_metadata: initializer and metadata of the norm's scale.
    norm_bias_init, norm_bias_metadata: initializer and metadata of the norm's
      bias.
  """

  recipe: CoatRecipe | None
  norm: ops.NormKind | None
  epsilon: float
  use_scale: bool
  scale_plus_one: bool
  use_norm_bias: bool
  dtype: DTypeLike | None
  param_dtype: DTypeLike
  kernel_init: nnx.Initializer | None
  kernel_metadata: Metadata
  bias_init: nnx.Initializer | None
  bias_metadata: Metadata
  scale_init: nnx.Initializer | None
  scale_metadata: Metadata
  norm_bias_init: nnx.Initializer | None
  norm_bias_metadata: Metadata


class BlockOptions(NormLinearOptions, total=False):
  """Options of `MLP` and `Attention`.

  The inherited options `kernel_*` and `bias_*` apply to the first matmul.

  Attributes:
    post_norm: norm after the second matmul, before the input is added: "rms" or
      "layer"; None (the default) for no norm. OLMo 2 uses only this norm; Gemma
      2 and 3 also use `norm`.
    use_bias: whether both matmuls add a bias, False by default.
    add_input: whether the block adds its input, the residual stream; True by
      default.
    out_kernel_init, out_kernel_metadata: initializer and metadata of the second
      matmul's kernel; by default, `kernel_init` and `kernel_metadata`.
    out_bias_init, out_bias_metadata: initializer and metadata of the second
      bias; by default, `bias_init` and `bias_metadata`.
  """

  post_norm: ops.NormKind | None
  use_bias: bool
  add_input: bool
  out_kernel_init: nnx.Initializer | None
  out_kernel_metadata: Metadata
  out_bias_init: nnx.Initializer | None
  out_bias_metadata: Metadata


# Defaults of blocks. Options that are missing here have the default of the norm
# or linear layer that they are passed to.
_DEFAULTS: dict[str, Any] = dict(
  recipe=None,
  norm="rms",
  post_norm=None,
  epsilon=1e-6,
  scale_plus_one=False,
  use_norm_bias=False,
  use_bias=False,
  add_input=True,
  dtype=jnp.bfloat16,
  param_dtype=jnp.float32,
  kernel_init=None,
  kernel_metadata=NO_METADATA,
)

# Map a block's options to constructor arguments of norms and linear layers.
_SHARED = {n: n for n in ("recipe", "dtype", "param_dtype", "rngs")}
_NORM = _SHARED | dict(
  epsilon="epsilon",
  use_scale="use_scale",
  scale_plus_one="scale_plus_one",
  use_norm_bias="use_bias",
  scale_init="scale_init",
  scale_metadata="scale_metadata",
  norm_bias_init="bias_init",
  norm_bias_metadata="bias_metadata",
)
_LINEAR = ("kernel_init", "kernel_metadata", "bias_init", "bias_metadata")
_FRONT = _SHARED | {n: n for n in ("use_bias", *_LINEAR)}
# For the second linear layer, `out_kernel_init` overrides `kernel_init`, etc.
_BACK = _FRONT | {f"out_{n}": n for n in _LINEAR}


class Parts(types.SimpleNamespace):
  """A block's options, and methods that make its norms and linear layers."""

  @classmethod
  def of(
    cls,
    op: str,
    options: Mapping[str, Any],
    rngs: Any,
    known: Collection[str] = BlockOptions.__annotations__,
  ) -> "Parts":
    """Adds defaults to the options; raises a TypeError for unknown options."""
    for name in options:
      if name not in known:
        raise TypeError(
          f"{op}.__init__() got an unexpected keyword argument {name!r}"
        )
    check_flags(op, add_input=options.get("add_input", True))
    return cls(**{**_DEFAULTS, **options}, rngs=rngs)

  def _named(self, names: Mapping[str, str]) -> dict[str, Any]:
    """Selects the options that `names` lists, and renames them."""
    options = vars(self)
    return {names[k]: options[k] for k in names if k in options}

  @property
  def shared(self) -> dict[str, Any]:
    """The options that the constructors of all modules accept."""
    return self._named(_SHARED)

  def make_norm(self, kind: Any, num_features: int) -> Norm | None:
    """Makes the norm of this kind; returns None if `kind` is None."""
    return make_norm(kind, num_features, **self._named(_NORM))

  def make_front(self, in_features: int, out_features: Any) -> Linear:
    """Makes the first linear layer; `out_features` is (2, F) with a gate."""
    options = self._named(_FRONT)
    if isinstance(out_features, tuple):
      options = stack_options(options)
    return Linear(in_features, out_features, split="columns", **options)

  def make_back(
    self, in_features: int, out_features: int, **options: Any
  ) -> Linear:
    """Makes the second linear layer; `options` override the block's options."""
    options = self._named(_BACK) | options
    return Linear(in_features, out_features, split="inputs", **options)


class NormLinear(RecipeModule):
  """A norm fused with the linear layer that follows it.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import NormLinear
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> layer = NormLinear(64, 192, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 192)

  Attributes:
    norm: RMSNorm or LayerNorm, which holds the norm's parameters, or None.
    linear: Linear, which holds the kernel and the bias.
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    use_bias: bool = True,
    rngs: nnx.Rngs,
    **options: Unpack[NormLinearOptions],
  ):
    """Initializes the parameters.

    Args:
      in_features: D, width of the input.
      out_features: F, width of the output.
      use_bias: whether to add a bias [F].
      rngs: its `params` stream provides the keys for initializers.
      **options: see `NormLinearOptions`.

    Raises:
      TypeError: an argument has the wrong type or is unknown.
      ValueError: a number is outside its range, or `norm` is unknown.
    """
    known = NormLinearOptions.__annotations__
    parts = Parts.of("NormLinear", options, rngs, known)
    parts.use_bias = use_bias
    super().__init__(
      **parts.shared,
      in_features=in_features,
      out_features=out_features,
    )
    self.norm = parts.make_norm(parts.norm, in_features)
    self.linear = parts.make_front(in_features, out_features)

  def __call__(self, x: Array, out_sharding: Sharding = None) -> Array:
    """Computes norm(x) kernel + bias; the norm is over the last axis.

    Args:
      x: [..., in_features], cast to `dtype`.
      out_sharding: how the output is sharded; None leaves it to JAX.

    Returns:
      [..., out_features] in `dtype`.
    """
    y = norm_linear(
      self.cast(x, self.linear.kernel),
      LinearWeights.of(self.linear, self.norm),
      **norm_options(self.norm),
      recipe=self.active_recipe,
    )
    return reshard(y, out_sharding)


def block_arguments(
  module: Any, norm: Norm | None, front: Linear, back: Linear, own: Any = None
) -> dict[str, Any]:
  """Returns the arguments of `block`; `own` holds the middle's weights."""
  post_norm = module.post_norm
  options = norm_options(norm) | dict(post_norm=None)
  if post_norm is not None:
    options |= dict(eps=post_norm.epsilon, post_norm=post_norm.kind)
  return options | dict(
    weights=BlockWeights(
      LinearWeights.of(front, norm), LinearWeights.of(back, post_norm), own
    ),
    add_input=module.add_input,
    recipe=module.active_recipe,
  )
