# SPDX-License-Identifier: Apache-2.0
"""Lion with its momentum stored in FP8, as an optax transformation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.ops.dispatch import op
from coat_jax.optimizer import arguments
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import (
  GroupCodecs,
  MomentOptions,
  ScaleByCoatLionState,
  Stored,
)
from coat_jax.optimizer.step import (
  StepScalars,
  step_of,
  transformation,
  update_of,
)
from coat_jax.optimizer.weights import Weight


class LionScalars(NamedTuple):
  """The scalars of a step of Lion, each f32 []."""

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array


def lion_scalars(b1: ArrayLike, b2: ArrayLike) -> LionScalars:
  """Computes the scalars, which are the same in every step."""
  numbers = b1, 1 - b1, b2, 1 - b2
  return LionScalars(*(jnp.asarray(x, jnp.float32) for x in numbers))


@functools.partial(jax.jit, inline=True)
def lion(g: Array, mu: Array, scalars: LionScalars) -> tuple[Array, Array]:
  """Returns the update and new momentum in f32, or complex64 for complex g."""
  s = scalars
  update = jnp.sign(s.one_minus_b1 * g + s.b1 * mu)
  return update, s.one_minus_b2 * g + s.b2 * mu


@op(mosaic="lion", mosaic_tpu="lion")
def lion_step(
  p: Weight,
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: LionScalars,
  step: StepScalars,
  *,
  groups: GroupCodecs,
) -> tuple[Weight, Stored]:
  """Applies Lion to a leaf, or to one layer of a stacked leaf, by `step_of`."""
  return step_of(lion, p, g, stored, part, (scalars, step), groups)


def scale_by_coat_lion(
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Rescales updates like Lion, with the momentum stored in FP8.

  Args:
    b1, b2, codec: as for `coat_lion`.
    quantize_mask, seed, shardings: as for `coat_adamw`.

  Returns:
    An `optax.GradientTransformation`. An update has the dtype to which gradient
    and parameter promote.

  Raises:
    TypeError, ValueError: the same as for `scale_by_coat_adam`.

  Source: arXiv:2302.06675, algorithm 2; `optax.scale_by_lion`.
  """
  options = MomentOptions(
    "scale_by_coat_lion",
    ScaleByCoatLionState,
    codec,
    quantize_mask,
    seed,
    shardings=shardings,
  )
  return lion_transformation(options, b1, b2)


def lion_transformation(
  options: MomentOptions, b1: ArrayLike, b2: ArrayLike
) -> optax.GradientTransformation:
  """Makes Lion's transformation; its errors name the function `options.op`."""
  arguments.check_hyperparameters(options.op, b1=b1, b2=b2)
  return transformation(
    options,
    functools.partial(update_of, lion),
    lambda _: lion_scalars(b1, b2),
  )


def coat_lion(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  *,
  weight_decay: optax.ScalarOrSchedule = 1e-3,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Lion with momentum in FP8, in a quarter of the memory of `optax.lion`.

  Let :math:`D` and :math:`E` be the codec's decoding and encoding, and
  :math:`S_t = E(m_t)` the state: 1.04 bytes per parameter by default.
  With gradients :math:`g_t`, parameters :math:`\theta_t`, learning rate
  :math:`\alpha_t` and weight decay :math:`\lambda`,

  .. math::

    \begin{align*}
      u_t &\leftarrow -\alpha_t \cdot \left( \mathrm{sign}((1-\beta_1) g_t +
      \beta_1 D(S_{t-1})) + \lambda \theta_t \right)\\
      S_t &\leftarrow E((1-\beta_2) g_t + \beta_2 D(S_{t-1})).
    \end{align*}

  Args:
    learning_rate: a number or a schedule; usually 3 to 10 times smaller than
      AdamW's learning rate.
    b1: weight of the momentum in the sum whose sign is the update.
    b2: decay rate of the momentum.
    weight_decay, mask, quantize_mask, seed, shardings: as for `coat_adamw`.
    codec: as for `coat_adamw`. The momentum is stored like a first moment.

  Returns:
    An `optax.GradientTransformationExtraArgs`.

  Raises:
    TypeError, ValueError: the same as for `coat_adamw`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import coat_lion
    >>> from coat_jax.optimizer import state_bytes
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    >>> size = state_bytes(jax.eval_shape(coat_lion(1e-4).init, params))
    >>> print(f"{size.bytes_per_param:.2f}")
    1.04

  Source: arXiv:2302.06675, algorithm 2; `optax.lion`.
  """
  op = "coat_lion"
  options = MomentOptions(
    op, ScaleByCoatLionState, codec, quantize_mask, seed, shardings=shardings
  )
  tx = lion_transformation(options, b1, b2)
  return arguments.descend(op, tx, learning_rate, weight_decay, mask)
