# SPDX-License-Identifier: Apache-2.0
"""Adam with moments stored in FP8: the arithmetic and an optax transformation.

Hyperparameters are passed as f32 scalars, so that one compiled program serves
all steps.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.codecs import factored
from coat_jax.codecs.group import Encoded
from coat_jax.numerics.formats import with_finite_square
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer.arguments import check_hyperparameters
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import (
  GroupCodecs,
  MomentOptions,
  ScaleByCoatAdamState,
  Stored,
)
from coat_jax.optimizer.step import (
  StepScalars,
  is_factored,
  put_layer,
  step_of,
  take_layer,
  transformation,
  update_of,
)
from coat_jax.optimizer.weights import Weight, in_f32


class AdamScalars(NamedTuple):
  """The scalars of one step of Adam, each f32 [], or None for an absent term.

  The update is optax's mu / c1 / (sqrt(nu / c2 + eps_root) + eps) with the bias
  corrections c1 and c2. We multiply numerator and denominator by sqrt(c2),
  because nu / c2 would overflow for a large nu and a small c2, such as 1 - b2
  in the first step. `ratio` multiplies mu; with Nesterov momentum,
  `gradient_ratio` multiplies the gradient.
  """

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array
  ratio: Array
  gradient_ratio: Array | None
  eps_root: Array | None
  eps: Array


def adam_scalars(
  count: ArrayLike,
  b1: ArrayLike,
  b2: ArrayLike,
  eps: ArrayLike,
  eps_root: ArrayLike,
  *,
  nesterov: bool = False,
) -> AdamScalars:
  """Computes the scalars of step `count`; the first step is 1."""
  c1, c2 = 1 - b1**count, 1 - b2**count  # pyright: ignore[reportOperatorIssue]
  root = jnp.sqrt(c2)
  ratio, gradient_ratio = root / c1, None
  if nesterov:
    next_c1 = 1 - b1 ** optax.safe_increment(count)
    ratio, gradient_ratio = b1 * root / next_c1, (1 - b1) * root / c1
  no_root = isinstance(eps_root, int | float) and eps_root == 0

  def f32(x) -> Array:
    return jnp.asarray(x, jnp.float32)

  return AdamScalars(
    b1=f32(b1),
    one_minus_b1=f32(1 - b1),
    b2=f32(b2),
    one_minus_b2=f32(1 - b2),
    ratio=f32(ratio),
    gradient_ratio=None if gradient_ratio is None else f32(gradient_ratio),
    eps_root=None if no_root else f32(eps_root * c2),
    eps=f32(eps * root),
  )


@functools.partial(jax.jit, inline=True)
def adam(
  g: Array, mu: Array, nu: Array, scalars: AdamScalars
) -> tuple[Array, Array, Array]:
  """Returns the update and the new moments, in f32 like the arguments.

  If the gradient is complex, the update and mu are complex64, and nu is f32.
  """
  s = scalars
  parts = [g.real, g.imag] if jnp.iscomplexobj(g) else [g]
  parts = [with_finite_square(x) for x in parts]
  g = parts[0] if len(parts) == 1 else jax.lax.complex(*parts)
  mu = s.b1 * mu + s.one_minus_b1 * g
  nu = s.b2 * nu
  for part in parts:
    nu = nu + s.one_minus_b2 * part * part
  # Do not divide an array by a scalar here. XLA may multiply by the scalar's
  # inverse instead, and may do so on one device but not on several.
  numerator = mu * s.ratio
  if s.gradient_ratio is not None:
    numerator = numerator + g * s.gradient_ratio
  inner = nu if s.eps_root is None else nu + s.eps_root
  return numerator / (jnp.sqrt(inner) + s.eps), mu, nu


def frozen_second() -> dict[str, Array]:
  """Returns decay rates with which `adam` does not change the second moment."""
  return dict(b2=jnp.float32(1), one_minus_b2=jnp.float32(0))


def add_means(old: Encoded, means: Sequence[Array], scalars: Any) -> Encoded:
  """Updates a factored moment with the means of rows and columns of g^2."""
  codes, *old_means = old
  return Encoded(
    codes,
    *(
      scalars.b2 * x + scalars.one_minus_b2 * y
      for x, y in zip(old_means, means, strict=True)
    ),
  )


def _update_factored(
  g: Array,
  stored: Stored,
  layer: Array | None,
  scalars: AdamScalars,
  grad_scale: Array | None,
  groups: GroupCodecs,
) -> tuple[Stored, AdamScalars]:
  """Updates a factored second moment before the step, as Adafactor does.

  Returns the moments, and scalars with which the step reads the second moment
  but does not change it. Moments that are not factored are returned unchanged.
  """
  if not is_factored(groups):
    return stored, scalars
  g = in_f32(g) if grad_scale is None else in_f32(g) * grad_scale
  g = with_finite_square(g)
  mu, nu = stored
  row = factored.row_of(*nu[1:])
  means = factored.means(g * g, row, nu.range.shape[row])
  old = nu if layer is None else take_layer(nu, layer)
  new = add_means(old, means, scalars)
  new = new if layer is None else put_layer(nu, new, layer)
  return (mu, new), scalars._replace(**frozen_second())


@op(mosaic="adam", mosaic_tpu="adam")
def adam_update(
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: AdamScalars,
  *,
  groups: GroupCodecs,
) -> tuple[Array, Stored]:
  """Returns Adam's update of a leaf and its new moments; see `update_of`."""
  stored, scalars = _update_factored(
    g, stored, part.layer, scalars, None, groups
  )
  return update_of(adam, g, stored, part, scalars, groups)


@op(mosaic="adam", mosaic_tpu="adam")
def adamw_step(
  p: Weight,
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: AdamScalars,
  step: StepScalars,
  *,
  groups: GroupCodecs,
) -> tuple[Weight, Stored]:
  """Applies AdamW to a leaf, or to one layer of it; see `step.step_of`."""
  stored, scalars = _update_factored(
    g, stored, part.layer, scalars, step.grad_scale, groups
  )
  return step_of(adam, p, g, stored, part, (scalars, step), groups)


def scale_by_coat_adam(
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  eps_root: ArrayLike = 0.0,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  nesterov: bool = False,
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Rescales updates like Adam, with moments stored in FP8.

  Args:
    b1, b2, eps, eps_root, codec, nesterov: as for `coat_adamw`.
    quantize_mask, seed, implementation, shardings: as for `coat_adamw`.

  Returns:
    An `optax.GradientTransformation`. An update has the dtype to which gradient
    and parameter promote, such as f32 for a BF16 gradient of an f32 parameter.

  Raises:
    NotImplementedError: `implementation` is unknown; (by `update`) the named
      implementation cannot run for a leaf.
    TypeError: `codec` is not a `MomentCodec`; a hyperparameter is not a number;
      (by `init`) a leaf is neither floating nor complex, or `quantize_mask`
      selects a complex leaf; (by `update`) the state has the wrong type.
    ValueError: a hyperparameter is negative or not finite; a decay rate exceeds
      0.9999999; (by `init`) `quantize_mask` selects a scalar; (by `update`) the
      state was made with another codec or for other parameters.

  Source: arXiv:2410.19313, section 4; docs/deviations.md 4 to 9.
  """
  options = MomentOptions(
    "scale_by_coat_adam",
    ScaleByCoatAdamState,
    codec,
    quantize_mask,
    seed,
    implementation,
    shardings,
  )
  return adam_transformation(options, b1, b2, eps, eps_root, nesterov)


def adam_transformation(
  options: MomentOptions,
  b1: ArrayLike,
  b2: ArrayLike,
  eps: ArrayLike,
  eps_root: ArrayLike,
  nesterov: bool,
) -> optax.GradientTransformation:
  """Makes Adam's transformation; its errors name the function `options.op`."""
  check_hyperparameters(options.op, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
  adam_update.require_known(options.implementation, options.op)
  return transformation(
    options,
    functools.partial(adam_update, implementation=options.implementation),
    lambda count: adam_scalars(count, b1, b2, eps, eps_root, nesterov=nesterov),
  )
