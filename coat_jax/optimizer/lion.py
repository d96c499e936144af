# SPDX-License-Identifier: Apache-2.0
"""Lion whose momentum is stored in FP8, as an optax transformation.

Lion keeps one moment and moves every parameter by the sign of its mix with the
gradient. With the default codec the state is 1.04 bytes a parameter. Its whole
step in one function is `fused.fused_coat_lion`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.ops.dispatch import op
from coat_jax.optimizer import stored_step
from coat_jax.optimizer.arguments import (
  check_decay_mask,
  check_hyperparameters,
)
from coat_jax.optimizer.leaf_step import update_leaves
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.moments import GroupCodecs, Stored
from coat_jax.optimizer.state import (
  ScaleByCoatLionState,
  check_codec,
  check_state,
  init_state,
  promoted,
)
from coat_jax.optimizer.stored_step import StepScalars
from coat_jax.optimizer.weights import Weight


class LionScalars(NamedTuple):
  """What a step of Lion multiplies with, f32 []: decays and one minus them."""

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array


def lion_scalars(b1: ArrayLike, b2: ArrayLike) -> LionScalars:
  """The scalars of any step."""
  numbers = b1, 1 - b1, b2, 1 - b2
  return LionScalars(*(jnp.asarray(x, jnp.float32) for x in numbers))


@functools.partial(jax.jit, inline=True)
def lion(g: Array, mu: Array, scalars: LionScalars) -> tuple[Array, Array]:
  """The update and the new moment, both f32, or complex64 of complex g."""
  s = scalars
  update = jnp.sign(s.one_minus_b1 * g + s.b1 * mu)
  return update, s.one_minus_b2 * g + s.b2 * mu


def lion_update(
  g: Array,
  stored: Stored,
  key: Array,
  scalars: LionScalars,
  *,
  groups: GroupCodecs,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> tuple[Array, Stored]:
  """Lion's update of one leaf, and its new moment.

  Args:
    g: [..., n], the gradient; complex where the moment is.
    stored: the moment, as it is stored.
    key: from `stochastic.leaf_key`, for the moment's random words.
    scalars: from `lion_scalars`.
    groups: its codec.
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    The update in the gradient's dtype, and the new moment, stored likewise.
  """
  return stored_step.update_of(
    lion, g, stored, key, scalars, groups, start, whole
  )


@op(mosaic="lion")
def lion_step(
  p: Weight,
  g: Array,
  stored: Stored,
  key: Array,
  scalars: LionScalars,
  step: StepScalars,
  *,
  groups: GroupCodecs,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
  layer: Array | None = None,
) -> tuple[Weight, Stored]:
  """A step of Lion on one leaf, or on one layer of it.

  Args and Returns: as of `stored_step.step_of`, of one moment.
  """
  return stored_step.step_of(
    lion, p, g, stored, key, scalars, step, groups, start, whole, layer
  )


def scale_by_coat_lion(
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Rescales updates by Lion whose momentum is in FP8. See `coat_lion`.

  Args:
    b1: share of the momentum in the update, whose sign is taken.
    b2: decay of the momentum.
    codec: how the momentum is stored, as the first moment of `codecs`.
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes (the
      others' momentum stays f32); None for `default_quantize_mask`. Called by
      `init` only: afterwards it is inferred from the state's dtypes.
    seed: of the random words of stochastic rounding.
    shardings: on a mesh of automatic axes, the parameters' shardings, a tree of
      `NamedSharding`s, so that each device steps its own shard; None leaves
      partitioning to XLA. Not needed on explicit axes.

  Returns:
    An `optax.GradientTransformation`. Updates have the dtype of the gradients
    and the parameters together.

  Raises:
    TypeError: `codec` is not a `MomentCodec`, or a hyperparameter is no number;
      or, by `init`, a leaf is neither floating nor complex, or `quantize_mask`
      chooses a complex one; or, by `update`, the state is another optimizer's.
    ValueError: `b1` or `b2` is negative or not below 1; or, by `update`, the
      state is not this codec's or these leaves'.

  Examples:
    >>> import optax
    >>> from coat_jax import scale_by_coat_lion
    >>> solver = optax.chain(
    ...   scale_by_coat_lion(b2=0.98), optax.scale_by_learning_rate(1e-4)
    ... )

  Source: arXiv:2302.06675, algorithm 2; `optax.scale_by_lion`.
  """
  name = "scale_by_coat_lion"
  check_codec(name, codec)
  check_hyperparameters(name, b1=b1, b2=b2, seed=seed)

  def init_fn(params):
    return init_state(name, params, codec, quantize_mask, ScaleByCoatLionState)

  def update_fn(updates, state, params=None):
    check_state(name, state, ScaleByCoatLionState)
    return update_leaves(
      name,
      lion_update,
      promoted(name, updates, params),
      state,
      lion_scalars(b1, b2),
      codec=codec,
      seed=seed,
      shardings=shardings,
    )

  return optax.GradientTransformation(init_fn, update_fn)


def coat_lion(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  mu_dtype: Any = None,
  weight_decay: optax.ScalarOrSchedule = 1e-3,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Lion with its momentum in FP8: `optax.lion` at a quarter of the state.

  Let :math:`D` and :math:`E` be the codec's decoding and encoding, and
  :math:`S_t = E(m_t)` the state, 1.04 bytes a parameter with the default codec.
  With gradients :math:`g_t`, parameters :math:`\theta_t`, learning rate
  :math:`\alpha_t` and weight decay :math:`\lambda`,

  .. math::

    \begin{align*}
      u_t &\leftarrow -\alpha_t \cdot \left( \mathrm{sign}((1-\beta_1) g_t +
      \beta_1 D(S_{t-1})) + \lambda \theta_t \right)\\
      S_t &\leftarrow E((1-\beta_2) g_t + \beta_2 D(S_{t-1})).
    \end{align*}

  Args:
    learning_rate: a number or a schedule; a third to a tenth of AdamW's.
    b1: share of the momentum in the update, whose sign is taken.
    b2: decay of the momentum.
    mu_dtype: unsupported: raises, pointing to `codec`.
    weight_decay: a number or a schedule; multiplied with the learning rate.
    mask: tree of bools or function of the parameters, where to decay weights.
    codec: how the momentum is stored, as the first moment of `codecs`.
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes; None
      for `default_quantize_mask`.
    seed: of the random words of stochastic rounding.
    shardings: as of `scale_by_coat_lion`.

  Returns:
    An `optax.GradientTransformationExtraArgs`.

  Raises:
    ValueError: `mu_dtype` is given; a rate or a decay is outside its range; or
      the mask is of other parameters.
    TypeError: as `scale_by_coat_lion`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import coat_lion, state_bytes
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    >>> size = state_bytes(jax.eval_shape(coat_lion(1e-4).init, params))
    >>> print(f"{size.bytes_per_param:.2f}")
    1.04

  Source: arXiv:2302.06675, algorithm 2; `optax.lion`.
  """
  if mu_dtype is not None:
    raise ValueError(
      f"coat_lion: the codec says how the momentum is stored, got {mu_dtype=}; "
      "pass codec=codecs.bfloat16() or codec=codecs.float32() instead"
    )
  op = "coat_lion"
  check_hyperparameters(
    op, learning_rate=learning_rate, weight_decay=weight_decay
  )
  mask = check_decay_mask(op, "mask", mask)
  return optax.chain(
    scale_by_coat_lion(
      b1,
      b2,
      codec=codec,
      quantize_mask=quantize_mask,
      seed=seed,
      shardings=shardings,
    ),
    optax.add_decayed_weights(weight_decay, mask),
    optax.scale_by_learning_rate(learning_rate),
  )
