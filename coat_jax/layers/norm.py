# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm that save their input in FP8, in 1 x G groups.

G is `recipe.group_size`. The forward pass quantizes its input, saves the codes,
and normalizes the dequantized values. The backward pass computes the exact
gradient of the norm at these values. Gradients pass straight through the
quantizer.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.module import (
  RecipeModule,
  check_float,
  check_recipe,
  value_of,
)
from coat_jax.layers.operands import in_groups
from coat_jax.layers.parameters import NO_METADATA, Metadata, make_param
from coat_jax.layers.residuals import cotangent, residual_scope, save_residual
from coat_jax.layers.rule import rule
from coat_jax.mesh import run_whole, spec_of, sum_tokens, tokens, unsplit_rows
from coat_jax.numerics.checks import (
  NOT_NEGATIVE,
  check_choice,
  check_flags,
  check_number,
)
from coat_jax.numerics.qtensor import QTensor
from coat_jax.recipes import CoatRecipe


class NormSaved(NamedTuple):
  """The values that a norm saves for its backward pass."""

  x: QTensor
  stats: ops.NormStats


def norm_forward(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  kind: ops.NormKind,
  eps: float,
  recipe: CoatRecipe,
) -> tuple[Array, NormSaved]:
  """Computes y, f32 [..., D]; also returns what `norm_gradients` reads."""
  x_q = save_residual("norm", in_groups(x, recipe))
  y, stats = ops.norm_values(x_q.dequantize(), gamma, beta, kind=kind, eps=eps)
  stats = save_residual("norm", stats)
  return y, NormSaved(x_q, stats)


def _fp8_norm_fwd(x, gamma, beta, kind, eps, recipe):
  y, saved = norm_forward(x, gamma, beta, kind, eps, recipe)
  return y.astype(x.dtype), saved


def _fp8_norm_bwd(kind, eps, recipe, inputs, saved, g):
  del kind, eps
  gamma, beta = inputs
  return norm_gradients(saved, gamma, beta, g, None, recipe)


def _specs(x, gamma, beta, kind, eps, recipe):
  del gamma, beta, kind, eps
  each = tokens(recipe.axes, x)
  return (each, P(), P()), each


_fp8_norm = rule(_fp8_norm_fwd, _fp8_norm_bwd, _specs, reads=(1, 2))


def norm_gradients(
  saved: NormSaved,
  gamma: Array | None,
  beta: Array | None,
  dy: Array,
  add: Array | None,
  recipe: CoatRecipe,
) -> tuple[Array, Array | None, Array | None]:
  """Returns dx + `add` in dy's dtype, dgamma and dbeta (summed over tokens)."""
  # A norm needs whole rows. If XLA split them, it would compute wrong gradients
  # on a mesh of data x fsdp x tensor.
  dx, dgamma, dbeta = ops.norm_bwd(
    unsplit_rows(dy),
    saved.x,
    gamma,
    saved.stats,
    dtype=dy.dtype,
    add=add,
    implementation=recipe.implementation,
  )
  if gamma is not None:
    gamma = cotangent(sum_tokens(dgamma, recipe.axes), gamma)
  if beta is not None:
    beta = cotangent(sum_tokens(dbeta, recipe.axes), beta)
  return dx, gamma, beta


def norm(
  x: Array,
  gamma: Array | None = None,
  beta: Array | None = None,
  *,
  kind: ops.NormKind,
  eps: float,
  recipe: CoatRecipe,
) -> Array:
  """Normalizes x along its last axis, in f32.

  Args:
    x: [..., D], BF16 (or f32).
    gamma, beta: [D] or None.
    kind: "rms" or "layer".
    eps: added to the mean square or the variance.
    recipe: if `recipe.nonlinear` is "fp8", x is saved in FP8, and the norm
      reads the rounded values.

  Returns:
    [..., D] in x's dtype.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: the kind is unknown, `eps` is negative, or shapes are
      inconsistent.
  """
  check_recipe("norm", recipe)
  check_float("norm", "x", x)
  if recipe.nonlinear == "fp8":
    return _fp8_norm((x, gamma, beta), kind, eps, recipe)

  def plain(x, gamma, beta):
    # Give x the same name as in FP8 recipes, for checkpoint policies.
    x = save_residual("norm", x)
    with residual_scope("norm"):
      y, _ = ops.norm_values(x, gamma, beta, kind=kind, eps=eps)
      return y.astype(x.dtype)

  return run_whole(plain, x, gamma, beta, out_specs=spec_of(x))


class Norm(RecipeModule):
  """Base of `RMSNorm` and `LayerNorm`.

  Attributes:
    kind: "rms" or "layer".
    scale, bias: [num_features] or None.
    num_features, epsilon, scale_plus_one: the constructor's arguments.
  """

  kind: ops.NormKind = "rms"

  def __init__(
    self,
    num_features: int,
    *,
    epsilon: float = 1e-6,
    recipe: CoatRecipe | None = None,
    use_scale: bool = True,
    use_bias: bool | None = None,
    scale_plus_one: bool = False,
    dtype: DTypeLike | None = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    scale_init: nnx.Initializer | None = None,
    bias_init: nnx.Initializer | None = None,
    scale_metadata: Metadata = NO_METADATA,
    bias_metadata: Metadata = NO_METADATA,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters.

    Args:
      num_features: D, width of the last axis.
      epsilon: added to the mean square or the variance.
      recipe: selects whether the norm rounds its input to FP8 and saves the
        codes; None for `recipes.coat()`.
      use_scale: whether there is a scale [D].
      use_bias: whether there is a bias [D]; None for a bias in LayerNorm only.
      scale_plus_one: whether to multiply by 1 + scale (computed in f32), as
        Gemma does. The scale then starts at zero.
      dtype: dtype of input and output; None for the common dtype of input and
        parameters, as in flax.
      param_dtype: dtype of the parameters and their gradients.
      scale_init: initializer of the scale; None for ones (zeros with
        `scale_plus_one`), which consume no PRNG key.
      bias_init: initializer of the bias; None for zeros, which consume no key.
      scale_metadata: metadata of the scale, such as `out_sharding`.
      bias_metadata: metadata of the bias.
      rngs: its stream `params` provides keys for `scale_init` and `bias_init`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `num_features` is below 1, `epsilon` is negative, or
        `scale_plus_one` is set without a scale.
    """
    super().__init__(
      recipe=recipe,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
      num_features=num_features,
    )
    op = type(self).__name__
    check_number(op, "epsilon", epsilon, NOT_NEGATIVE, "1e-6 is usual")
    self.num_features, self.epsilon = num_features, epsilon
    use_bias = self.kind == "layer" if use_bias is None else use_bias
    check_flags(
      op,
      use_scale=use_scale,
      use_bias=use_bias,
      scale_plus_one=scale_plus_one,
    )
    if scale_plus_one and not use_scale:
      raise ValueError(
        f"{op}: scale_plus_one must come with a scale, got "
        "use_scale=False; leave one of these arguments out"
      )
    self.use_scale, self.use_bias = use_scale, use_bias
    self.scale_plus_one = scale_plus_one
    self.param_dtype = param_dtype
    self.scale = nnx.data(None)
    self.bias = nnx.data(None)
    shape = (num_features,)
    if use_scale:
      self.scale = make_param(
        scale_init,
        rngs,
        shape,
        param_dtype,
        scale_metadata,
        default=jnp.zeros if scale_plus_one else jnp.ones,
      )
    if use_bias:
      self.bias = make_param(bias_init, rngs, shape, param_dtype, bias_metadata)

  @property
  def gamma(self) -> Array | None:
    """The factor [num_features] that the norm multiplies by, or None."""
    scale = value_of(self.scale)
    if scale is None or not self.scale_plus_one:
      return scale
    return 1 + scale.astype(jnp.float32)

  def __call__(self, x: Array) -> Array:
    """Casts x [..., num_features] to `dtype` and normalizes it."""
    return norm(
      self.cast(x, self.scale, self.bias),
      self.gamma,
      value_of(self.bias),
      kind=self.kind,
      eps=self.epsilon,
      recipe=self.active_recipe,
    )


class RMSNorm(Norm):
  """x / sqrt(mean(x^2) + epsilon) * scale; see `Norm` for its arguments.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import RMSNorm
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> norm = RMSNorm(64, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
  """

  kind = "rms"


class LayerNorm(Norm):
  """(x - mean) / sqrt(var + epsilon) * scale + bias; see `Norm`.

  With `use_scale=False, use_bias=False`, it has no parameters, as in OLMo.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.layers import LayerNorm
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> norm = LayerNorm(64, recipe=recipes.coat(), rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 16, 64), jnp.bfloat16)).shape
    (2, 16, 64)
  """

  kind = "layer"


def make_norm(
  kind: ops.NormKind | None, num_features: int, **kwargs
) -> Norm | None:
  """Makes a norm module of this kind; returns None if `kind` is None."""
  norms = {"rms": RMSNorm, "layer": LayerNorm, None: None}
  check_choice("norm", "kind", kind, tuple(norms))
  norm = norms[kind]
  return None if norm is None else norm(num_features, **kwargs)


def weights_of_norm(norm: Norm | None) -> tuple[Array | None, Array | None]:
  """Returns the gamma and beta of a norm module."""
  if norm is None:
    return None, None
  return norm.gamma, value_of(norm.bias)


def norm_options(norm: Norm | None) -> dict[str, Any]:
  """Returns a norm module's `kind` and `eps` as keyword arguments."""
  if norm is None:
    return dict(kind=None, eps=0.0)
  return dict(kind=norm.kind, eps=norm.epsilon)
