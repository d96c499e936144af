# SPDX-License-Identifier: Apache-2.0
"""AdamW and Lion with FP8 moments, each with its whole step in one function.

`fused_coat_adamw` does what `coat_adamw` and `apply_updates` do together, and
`fused_coat_lion` does the same for Lion: on a GPU with one kernel per leaf. The
states are those of the optax transformations (`ScaleByCoatAdamState`,
`ScaleByCoatLionState`), which are the first element of a chain's state, so
either optimizer can read the other's checkpoints. With `low_bits` the state
also stores a byte per weight (`LowBitsState`).
"""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import adam, lion
from coat_jax.optimizer.arguments import check_hyperparameters
from coat_jax.optimizer.fused_transformation import (
  FusedTransformation,
  fused_transformation,
)
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import ScaleByCoatAdamState, ScaleByCoatLionState


def fused_coat_adamw(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  eps_root: ArrayLike = 0.0,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  quantize_mask: QuantizeMask | None = None,
  low_bits: bool = False,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> FusedTransformation:
  """Does what `coat_adamw` and `apply_updates` do, in one step.

  Everything is f32 from the gradient to the new parameter. A bf16 parameter is
  rounded stochastically: to bf16 with the words that `apply_updates` draws for
  the same seed and `step=state.count` of the new state, or, with `low_bits`, to
  24 bits. docs/optimizer.md says which one to choose. With f32 gradients and
  parameters the result is that of the optax chain, except that another compiled
  program may round differently by some ulp, which can change a code.

  Args:
    learning_rate: a number or a schedule.
    b1, b2: decay of the first and the second moment.
    eps: added to the denominator, outside the root.
    eps_root: added to the second moment, inside the root.
    codec: how the moments are stored, from `codecs`; holds every static choice.
    weight_decay: a number or a schedule; multiplied with the learning rate.
    mask: which weights decay: a tree of bools, or a function of the parameters
      that returns one.
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes; None
      for `default_quantize_mask`.
    low_bits: whether `init` makes a state with another byte for each bf16
      parameter, 24 bits in all. If parameters are f32, `init` takes the bytes
      from them, and the caller continues with `split_weights(params)[0]`; if
      they are bf16, the bytes are zeros. `apply` infers it from the state.
    seed: seed of the random words of stochastic rounding.
    implementation: "mosaic" for the kernel, "xla" for the definition, None for
      the kernel if a leaf and the platform allow it.
    shardings: on a mesh of automatic axes, the parameters' shardings, a tree of
      `NamedSharding`s, so that the kernel can run on each device's shard; None
      leaves partitioning to XLA, which cannot partition a kernel. Not needed on
      explicit axes, where shardings are part of types.

  Returns:
    A `FusedTransformation`.

  Raises:
    NotImplementedError: the implementation is unknown; (by `apply`) it was
      named and cannot take a leaf.
    TypeError, ValueError: the same as for `coat_adamw`.

  Examples:
    >>> optimizer = fused_coat_adamw(3e-4, weight_decay=0.1)
    >>> state = optimizer.init(params)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def step(params, state, grads):
    ...   return optimizer.apply(grads, state, params)

  Source: arXiv:2410.19313, section 4.
  """
  op = "fused_coat_adamw"
  check_hyperparameters(op, b1=b1, b2=b2, eps=eps, eps_root=eps_root)

  def scalars_of(count: ArrayLike) -> adam.AdamScalars:
    return adam.adam_scalars(count, b1, b2, eps, eps_root)

  return fused_transformation(
    op,
    adam.adamw_step,
    scalars_of,
    ScaleByCoatAdamState,
    learning_rate=learning_rate,
    weight_decay=weight_decay,
    mask=mask,
    codec=codec,
    quantize_mask=quantize_mask,
    low_bits=low_bits,
    seed=seed,
    implementation=implementation,
    shardings=shardings,
  )


def fused_coat_lion(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  weight_decay: optax.ScalarOrSchedule = 1e-3,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  quantize_mask: QuantizeMask | None = None,
  low_bits: bool = False,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> FusedTransformation:
  """Does what `coat_lion` and `apply_updates` do, in one step.

  As in `fused_coat_adamw`, everything is f32 from the gradient to the new
  parameter, and a bf16 parameter is rounded stochastically with the words that
  `apply_updates` draws.

  Args:
    learning_rate: a number or a schedule; a third to a tenth of AdamW's.
    b1: share of the momentum in the mix whose sign is the update.
    b2: decay of the momentum.
    codec: how the momentum is stored: like the codec's first moment.
    weight_decay: a number or a schedule; multiplied with the learning rate.
    mask: which weights decay: a tree of bools, or a function of the parameters
      that returns one.
    quantize_mask, low_bits, seed, implementation, shardings: as for
      `fused_coat_adamw`.

  Returns:
    A `FusedTransformation`.

  Raises:
    NotImplementedError: the implementation is unknown; (by `apply`) it was
      named and cannot take a leaf.
    TypeError, ValueError: the same as for `coat_lion`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax.optimizer import fused_coat_lion
    >>> optimizer = fused_coat_lion(1e-2, weight_decay=0.1)
    >>> params = {"w": jnp.ones((16, 256))}
    >>> state = optimizer.init(params)
    >>> params, state = jax.jit(optimizer.apply)(params, state, params)
    >>> print(f"{params['w'][0, 0]:.3f}")
    0.989

  Source: arXiv:2302.06675, algorithm 2.
  """

  op = "fused_coat_lion"
  check_hyperparameters(op, b1=b1, b2=b2)

  def scalars_of(count: ArrayLike) -> lion.LionScalars:
    del count  # Lion corrects no bias.
    return lion.lion_scalars(b1, b2)

  return fused_transformation(
    op,
    lion.lion_step,
    scalars_of,
    ScaleByCoatLionState,
    learning_rate=learning_rate,
    weight_decay=weight_decay,
    mask=mask,
    codec=codec,
    quantize_mask=quantize_mask,
    low_bits=low_bits,
    seed=seed,
    implementation=implementation,
    shardings=shardings,
  )
