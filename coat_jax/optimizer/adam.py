# SPDX-License-Identifier: Apache-2.0
"""One step of Adam on one leaf with encoded moments: the definition.

`adam_update` gives the update, for optax; `adamw_step` takes the whole step,
parameter included. Both decode, update the moments in f32, use them as they
are and encode them again (`stored_step`). `ops` calls these or the kernel that
does the same in one pass over memory; the numbers of a step come as f32
scalars, so that one program serves all steps and leaves.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax.formats import with_finite_square
from coat_jax.ops.dispatch import op
from coat_jax.optimizer import stored_step
from coat_jax.optimizer.moments import GroupCodecs, Stored
from coat_jax.optimizer.stored_step import StepScalars
from coat_jax.optimizer.weights import Weight


class AdamScalars(NamedTuple):
  """What one step of Adam multiplies with and adds, f32 [].

  The update is optax's mu / c1 / (sqrt(nu / c2 + eps_root) + eps) with the bias
  corrections c1 and c2, all times sqrt(c2): nu / c2 overflows where nu is large
  and c2 small (1 - b2 at first).

  Attributes:
    b1, one_minus_b1, b2, one_minus_b2: of the moving averages.
    ratio: sqrt(c2) / c1, or Nesterov's b1 sqrt(c2) / c1 of the next step.
    gradient_ratio: Nesterov's (1 - b1) sqrt(c2) / c1, or None.
    eps_root: eps_root c2, or None for zero.
    eps: eps sqrt(c2).
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
  """The scalars of step `count`, the first being 1."""
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
  """The update and the new moments, all f32; of complex g but nu complex64."""
  s = scalars
  parts = [with_finite_square(x) for x in _real_parts(g)]
  g = parts[0] if len(parts) == 1 else jax.lax.complex(*parts)
  mu = s.b1 * mu + s.one_minus_b1 * g
  nu = s.b2 * nu
  for part in parts:
    nu = nu + s.one_minus_b2 * part * part
  # No array is divided by a scalar: XLA multiplies by its inverse or does not,
  # and not alike on one device and on many.
  numerator = mu * s.ratio
  if s.gradient_ratio is not None:
    numerator = numerator + g * s.gradient_ratio
  inner = nu if s.eps_root is None else nu + s.eps_root
  return numerator / (jnp.sqrt(inner) + s.eps), mu, nu


def _real_parts(x: Array) -> list[Array]:
  return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


@op(mosaic="adam")
def adam_update(
  g: Array,
  stored: Stored,
  key: Array,
  scalars: AdamScalars,
  *,
  groups: GroupCodecs,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> tuple[Array, Stored]:
  """Adam's update of one leaf, and its new moments.

  Args:
    g: [..., n], the gradient; complex where the first moment is.
    stored: the two moments, as they are stored.
    key: from `stochastic.leaf_key`, for the moments' random words.
    scalars: of this step.
    groups: the codecs of both.
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    The update in the gradient's dtype, and the new moments, stored likewise.
  """
  return stored_step.update_of(
    adam, g, stored, key, scalars, groups, start, whole
  )


@op(mosaic="adam")
def adamw_step(
  p: Weight,
  g: Array,
  stored: Stored,
  key: Array,
  scalars: AdamScalars,
  step: StepScalars,
  *,
  groups: GroupCodecs,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
  layer: Array | None = None,
) -> tuple[Weight, Stored]:
  """A step of AdamW on one leaf, or on one layer of it.

  Args and Returns: as of `stored_step.step_of`, of two moments.
  """
  return stored_step.step_of(
    adam, p, g, stored, key, scalars, step, groups, start, whole, layer
  )
