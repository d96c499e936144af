# SPDX-License-Identifier: Apache-2.0
"""AdamW with its moments stored in FP8, as an optax transformation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.numerics import stochastic
from coat_jax.numerics.checks import flatten_like
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import arguments, weights
from coat_jax.optimizer.adam import adam_transformation
from coat_jax.optimizer.adam import scale_by_coat_adam as scale_by_coat_adam
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import MomentOptions
from coat_jax.optimizer.state import (
  ScaleByCoatAdamState as ScaleByCoatAdamState,
)


def coat_adamw(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  eps_root: ArrayLike = 0.0,
  *,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  nesterov: bool = False,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""AdamW with moments in FP8, in a quarter of the memory of `optax.adamw`.

  Let :math:`D` and :math:`E` be the codec's decoding and encoding, and
  :math:`S_t = (E(m_t), E(v_t))` the state: 2.08 bytes per parameter with the
  default codec, compared with 8 in f32. With gradients :math:`g_t`, parameters
  :math:`\theta_t`, learning rate :math:`\alpha_t` and weight decay
  :math:`\lambda`,

  .. math::

    \begin{align*}
      m_t &\leftarrow \beta_1 \cdot D(E(m_{t-1})) + (1-\beta_1) \cdot g_t \\
      v_t &\leftarrow \beta_2 \cdot D(E(v_{t-1})) + (1-\beta_2) \cdot {g_t}^2 \\
      \hat{m}_t &\leftarrow m_t / {(1-\beta_1^t)} \\
      \hat{v}_t &\leftarrow v_t / {(1-\beta_2^t)} \\
      u_t &\leftarrow -\alpha_t \cdot \left( \hat{m}_t / \left({\sqrt{\hat{v}_t
      + \bar{\varepsilon}} + \varepsilon} \right) + \lambda \theta_{t} \right)\\
      S_t &\leftarrow (E(m_t), E(v_t)).
    \end{align*}

  All arithmetic is in f32. See `coat_jax.codecs` for the codecs.

  Args:
    learning_rate: a number or a schedule.
    b1, b2: decay rates of the first and the second moment.
    eps: added to the denominator, outside the square root.
    eps_root: added to the second moment, inside the square root.
    weight_decay: a number or a schedule; multiplied by the learning rate.
    mask: a tree of bools that selects the parameters to which weight decay
      applies, or a function that computes such a tree from the parameters.
    nesterov: whether to use Nesterov momentum.
    codec: determines how the moments are stored (format, group size, ...): the
      result of a function in `codecs`.
    quantize_mask: `(path, leaf) -> bool`, selects the leaves that the codec
      encodes; None for `default_quantize_mask`. With
      `optax.inject_hyperparams`, list `quantize_mask` in `static_args`;
      otherwise optax treats it as a schedule.
    seed: seed of the random words for stochastic rounding. Runs of the same
      compiled program agree bit for bit. An eager call may differ from a jitted
      call by a few ulps.
    implementation: "mosaic" for the GPU kernel, "mosaic_tpu" for the TPU
      kernel, "xla" for plain JAX. None uses a kernel wherever one supports the
      leaf and the platform.
    shardings: on a mesh of automatic axes, the parameters' shardings, as a tree
      of `NamedSharding`s. The kernel then runs on each device's shard. If None,
      XLA partitions the step, so several devices run it in plain JAX. On
      explicit axes, omit `shardings`: the types of arrays contain them.

  Returns:
    An `optax.GradientTransformationExtraArgs`.

  Raises:
    ValueError: a number is outside its range, or the mask does not fit the
      parameters; for other causes, see `scale_by_coat_adam`.
    TypeError, NotImplementedError: see `scale_by_coat_adam`.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> from coat_jax.optax_coat import coat_adamw
    >>> solver = coat_adamw(learning_rate=0.003)
    >>> params = jnp.ones((64, 128))
    >>> opt_state = solver.init(params)
    >>> print(opt_state[0].mu.codes.dtype)
    float8_e4m3fn
    >>> updates, opt_state = solver.update(params, opt_state, params)
    >>> params = optax.apply_updates(params, updates)

  Source: arXiv:2410.19313, section 4; `optax.adamw`.
  """
  op = "coat_adamw"
  options = MomentOptions(
    op,
    ScaleByCoatAdamState,
    codec,
    quantize_mask,
    seed,
    implementation,
    shardings,
  )
  tx = adam_transformation(options, b1, b2, eps, eps_root, nesterov)
  return arguments.descend(op, tx, learning_rate, weight_decay, mask)


def apply_updates(
  params: optax.Params,
  updates: optax.Updates,
  *,
  step: ArrayLike,
  seed: ArrayLike = 0,
) -> optax.Params:
  """Applies updates like optax, but does not lose small ones in bf16 rounding.

  A bf16 value has 8 significant bits. Most updates are below 1/512 of their
  parameter, and so would vanish if the sum were rounded to nearest. We compute
  the sum in f32 and round it to bf16 stochastically, so that E[result] is the
  sum. Parameters of other dtypes are updated by `optax.apply_updates`.

  Args:
    params: tree of parameters.
    updates: tree of the same structure, preferably in f32.
    step: number of this step, such as the state's `count`.
    seed: seed of the random words. The moments are rounded with different
      random words, even for the same seed and step.

  Returns:
    The new parameters, in the same dtypes.

  Raises:
    TypeError: `step` or `seed` is not a whole number.
    ValueError: the updates do not fit the parameters.
  """
  op = "apply_updates"
  arguments.check_hyperparameters(op, step=step, seed=seed)
  leaves, treedef = jax.tree.flatten(params)
  remedy = "pass the updates of these parameters"
  changes = flatten_like(
    op, "updates", updates, "the parameters", treedef, remedy
  )
  out = []
  for i, (p, u) in enumerate(zip(leaves, changes, strict=True)):
    if u is None:  # As in optax, the parameter stays as it is.
      out.append(p)
      continue
    if jnp.shape(u) != jnp.shape(p):
      raise ValueError(
        f"{op}: updates must have the shapes of the parameters, got "
        f"{jnp.shape(u)} for {jnp.shape(p)}; pass updates of these parameters"
      )
    if jnp.result_type(p) != jnp.bfloat16:
      out.append(optax.apply_updates(p, u))
      continue
    key = stochastic.leaf_key(seed, step, i)
    out.append(weights.add_update(p, u, key))
  return treedef.unflatten(out)
