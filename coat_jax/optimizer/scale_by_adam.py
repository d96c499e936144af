# SPDX-License-Identifier: Apache-2.0
"""Adam whose moments are stored in FP8: the part of an optax chain."""

from typing import Any

import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import adam
from coat_jax.optimizer.arguments import check_hyperparameters
from coat_jax.optimizer.leaf_step import update_leaves
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import (
  ScaleByCoatAdamState,
  check_codec,
  check_state,
  init_state,
  promoted,
)


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
  """Rescales updates by Adam whose moments are in FP8. See `coat_adamw`.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the denominator, outside the root.
    eps_root: added to the second moment, inside the root.
    codec: how the moments are stored, from `codecs`.
    nesterov: whether to use Nesterov momentum.
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes (the
      others' moments stay f32); None for `default_quantize_mask`. Called by
      `init` only: afterwards it is inferred from the state's dtypes.
    seed: of the random words of stochastic rounding.
    implementation: "mosaic" for the GPU kernel, "xla" for plain JAX, None for
      the kernel where a leaf and the platform allow it.
    shardings: on a mesh of automatic axes, the parameters' shardings, a tree of
      `NamedSharding`s, so that the kernel can run on each device's shard; None
      leaves partitioning to XLA, which cannot partition a kernel. Not needed on
      explicit axes, where shardings are part of types.

  Returns:
    An `optax.GradientTransformation`. Updates have the dtype of the gradients
    and the parameters together: f32 of BF16 gradients of f32 parameters.

  Raises:
    NotImplementedError: `implementation` is no such name.
    TypeError: `codec` is not a `MomentCodec`, or a hyperparameter is no number;
      or, by `init`, a leaf is neither
      floating nor complex, or `quantize_mask` chooses a complex one; or, by
      `update`, the state is another optimizer's.
    ValueError: a hyperparameter is negative or not finite, or a decay not below
      1; or, by `update`, the state is not this codec's or these leaves'.

  Examples:
    >>> import optax
    >>> from coat_jax import codecs, scale_by_coat_adam
    >>> solver = optax.chain(
    ...   optax.clip_by_global_norm(1.0),
    ...   scale_by_coat_adam(b2=0.95, codec=codecs.coat()),
    ...   optax.scale_by_learning_rate(3e-4),
    ... )

  Source: arXiv:2410.19313, section 4; docs/deviations.md 4 to 9.
  """
  op = "scale_by_coat_adam"
  check_codec(op, codec)
  check_hyperparameters(op, b1=b1, b2=b2, eps=eps, eps_root=eps_root, seed=seed)
  adam.adam_update.require_known(implementation, op)

  def init_fn(params):
    return init_state(op, params, codec, quantize_mask)

  def update_fn(updates, state, params=None):
    check_state(op, state, ScaleByCoatAdamState)
    count = optax.safe_increment(state.count)
    scalars = adam.adam_scalars(count, b1, b2, eps, eps_root, nesterov=nesterov)
    return update_leaves(
      op,
      adam.adam_update,
      promoted(op, updates, params),
      state,
      scalars,
      codec=codec,
      seed=seed,
      shardings=shardings,
      implementation=implementation,
    )

  return optax.GradientTransformation(init_fn, update_fn)
