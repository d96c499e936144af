# SPDX-License-Identifier: Apache-2.0
"""Muon with its momentum stored in FP8, as an optax transformation."""

import dataclasses
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
from coat_jax.optimizer import arguments
from coat_jax.optimizer.adam import adam_transformation
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.matrices import (
  COEFFICIENTS,
  Matrices,
  MatrixSplit,
  NewtonSchulz,
  check_split,
  checked_matrices,
  orthogonalize,
)
from coat_jax.optimizer.shards import shardings_of
from coat_jax.optimizer.state import (
  GroupCodecs,
  MomentOptions,
  ScaleByCoatAdamState,
  ScaleByCoatMuonState,
  Stored,
)
from coat_jax.optimizer.step import decode, encode, transformation
from coat_jax.optimizer.weights import in_f32

# Muon and AdamW both number leaves from 0. With the same seed, they would use
# the same random bits.
_ADAM_STREAM = 0x2545F491


class MuonScalars(NamedTuple):
  """The scalars of a step of Muon, each f32 [].

  Muon orthogonalizes ratio * momentum + gradient_ratio * gradient. Without
  Nesterov momentum, `gradient_ratio` is None, and `ratio` is the inverse of the
  momentum's bias correction.
  """

  beta: Array
  one_minus_beta: Array
  ratio: Array
  gradient_ratio: Array | None


def muon_scalars(
  count: ArrayLike, beta: ArrayLike, *, nesterov: bool
) -> MuonScalars:
  """Computes the scalars of step `count`; the first step is 1."""
  c = 1 - beta**count  # pyright: ignore[reportOperatorIssue]
  ratio, gradient_ratio = 1 / c, None
  if nesterov:
    ratio = beta / (1 - beta ** optax.safe_increment(count))
    gradient_ratio = jnp.asarray((1 - beta) / c, jnp.float32)

  def f32(x) -> Array:
    return jnp.asarray(x, jnp.float32)

  return MuonScalars(f32(beta), f32(1 - beta), f32(ratio), gradient_ratio)


def muon_momentum(
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: MuonScalars,
  *,
  groups: GroupCodecs,
) -> tuple[Array, Stored]:
  """Returns the array to orthogonalize, f32, and the encoded new momentum."""
  s = scalars
  (mu,) = decode(groups, stored)
  gradient = in_f32(g)
  mu = s.beta * mu + s.one_minus_beta * gradient
  direction = s.ratio * mu
  if s.gradient_ratio is not None:
    direction = direction + s.gradient_ratio * gradient
  return direction, encode(groups, (mu,), part)


def scale_by_coat_muon(
  ns_coeffs: tuple[float, float, float] = COEFFICIENTS,
  ns_steps: int | Array = 5,
  beta: ArrayLike = 0.95,
  eps: ArrayLike = 1e-8,
  *,
  nesterov: bool = True,
  consistent_rms: ArrayLike | None = None,
  matrices: Matrices | None = None,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Rescales updates like Muon, with the momentum stored in FP8.

  Args:
    ns_coeffs, ns_steps, beta, eps, nesterov, consistent_rms: as for
      `coat_muon`.
    matrices: `(path, leaf) -> MatrixSplit`, specifies how a leaf is split into
      matrices; by default `hidden_matrices`.
    codec: as for `coat_adamw`; only its codec for the first moment is used.
    quantize_mask, seed: as for `coat_adamw`.
    shardings: as for `coat_muon`.

  Returns:
    An `optax.GradientTransformation` for trees that contain only matrices.

  Raises:
    TypeError: `codec` is not a `MomentCodec`; a hyperparameter is not a number;
      `matrices` is not a function; (by `update`) `matrices` returns neither a
      `MatrixSplit` nor None, or the state belongs to another optimizer.
    ValueError: a hyperparameter is outside its range; (by `update`) a leaf is
      not a matrix, or cannot be split as `matrices` specifies; the state was
      made with another codec or for other parameters.

  Source: Jordan et al., Muon, 2024; `optax.contrib.scale_by_muon`.
  """
  options = MomentOptions(
    "scale_by_coat_muon",
    ScaleByCoatMuonState,
    codec,
    quantize_mask,
    seed,
    shardings=shardings,
  )
  iteration = NewtonSchulz(ns_coeffs, ns_steps, eps, consistent_rms)
  return muon_transformation(options, iteration, beta, nesterov, matrices)


def muon_transformation(
  options: MomentOptions,
  iteration: NewtonSchulz,
  beta: ArrayLike,
  nesterov: bool,
  matrices: Matrices | None,
) -> optax.GradientTransformation:
  """Makes Muon's transformation; its errors name the function `options.op`."""
  op = options.op
  arguments.check_coefficients(op, iteration.coefficients)
  arguments.check_hyperparameters(
    op,
    ns_steps=iteration.steps,
    beta=beta,
    eps=iteration.eps,
    consistent_rms=iteration.consistent_rms,
  )
  split_of = checked_matrices(op, matrices)
  momentum = transformation(
    options,
    muon_momentum,
    lambda count: muon_scalars(count, beta, nesterov=nesterov),
  )

  def splits_of(tree: Any) -> list[MatrixSplit]:
    out = []
    for path, leaf in leaf_paths(tree):
      split = split_of(path, leaf)
      if split is None:
        raise ValueError(
          f"{op}: leaves must be matrices, got {list(leaf.shape)} at {path!r}; "
          "use coat_muon, which updates other leaves by AdamW, or pass matrices"
        )
      check_split(op, path, leaf, split)
      out.append(split)
    return out

  def update_fn(updates, state, params=None) -> Any:
    splits = splits_of(updates)
    like = jax.tree.leaves(arguments.promoted(op, updates, params))
    directions, new_state = momentum.update(updates, state, params)
    leaves, treedef = jax.tree.flatten(directions)
    where = shardings_of(options, state.mu)
    columns = zip(leaves, splits, where, like, strict=True)
    new = [
      orthogonalize(x, split, sharding, iteration).astype(g.dtype)
      for x, split, sharding, g in columns
    ]
    return treedef.unflatten(new), new_state

  return optax.GradientTransformation(momentum.init, update_fn)


def coat_muon(
  learning_rate: optax.ScalarOrSchedule,
  ns_coeffs: tuple[float, float, float] = COEFFICIENTS,
  ns_steps: int | Array = 5,
  beta: ArrayLike = 0.95,
  eps: ArrayLike = 1e-8,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
  *,
  nesterov: bool = True,
  adam_b1: ArrayLike = 0.9,
  adam_b2: ArrayLike = 0.999,
  adam_eps_root: ArrayLike = 0.0,
  adam_weight_decay: optax.ScalarOrSchedule = 0.0,
  adam_weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
  adam_learning_rate: optax.ScalarOrSchedule | None = None,
  consistent_rms: ArrayLike | None = None,
  matrices: Matrices | None = None,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
  shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon with momentum in FP8 for matrices, `coat_adamw` for all other leaves.

  Hidden matrices are updated by their orthogonalized momentum, whose singular
  values are near 1. With the default codec, the momentum takes 1.04 bytes per
  parameter. For other encoded parameters, such as embeddings and the head, the
  two moments of AdamW take 2.08 bytes per parameter.

  Args:
    learning_rate: a number or a schedule.
    ns_coeffs: coefficients of the Newton-Schulz iteration.
    ns_steps: number of Newton-Schulz iterations.
    beta: decay rate of the momentum.
    eps: added to the norm by which a matrix is divided; also AdamW's eps.
    weight_decay: weight decay of matrices; multiplied by the learning rate.
    weight_decay_mask: selects matrices that decay, like `mask` of `coat_adamw`.
    nesterov: whether Muon and AdamW use Nesterov momentum.
    adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_weight_decay_mask:
      arguments of AdamW.
    adam_learning_rate: AdamW's learning rate; None for `learning_rate`.
    consistent_rms: updates are multiplied by this number times
      sqrt(max(inputs, outputs)); with 0.2, they are about as large as AdamW's.
      None multiplies them by sqrt(max(1, outputs / inputs)).
    matrices: `(path, leaf) -> MatrixSplit | None`, specifies how a leaf is
      split into matrices. AdamW updates leaves whose result is None.
      The default is `hidden_matrices`. For a model from `models`, pass
      `models.model_matrices(config)`. With `optax.inject_hyperparams`, list
      `matrices` in `static_args`; otherwise optax treats it as a schedule.
    codec, quantize_mask, seed: as for `coat_adamw`.
    shardings: on a mesh of automatic axes, the shardings of all parameters, as
      for `coat_adamw`. Each device then updates its shard of the momentum. The
      orthogonalization splits a matrix's longer axis over devices.

  Returns:
    An `optax.GradientTransformationExtraArgs`.

  Raises:
    TypeError, ValueError: as for `coat_adamw` and `scale_by_coat_muon`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import coat_muon
    >>> params = {"up": jnp.ones((64, 128)), "norm": jnp.ones(64)}
    >>> solver = coat_muon(0.02, adam_learning_rate=3e-4)
    >>> state = solver.init(params)
    >>> updates, state = solver.update(params, state, params)

  Source: Jordan et al., Muon, 2024; `optax.contrib.muon`.
  """
  op = "coat_muon"
  options = MomentOptions(
    op, ScaleByCoatMuonState, codec, quantize_mask, seed, shardings=shardings
  )
  arguments.check_hyperparameters(
    op,
    adam_b1=adam_b1,
    adam_b2=adam_b2,
    adam_eps_root=adam_eps_root,
    adam_learning_rate=adam_learning_rate,
  )
  split_of = checked_matrices(op, matrices)

  def label(params: Any) -> Any:
    labels = [
      "adam" if split_of(path, leaf) is None else "muon"
      for path, leaf in leaf_paths(params)
    ]
    return jax.tree.structure(params).unflatten(labels)

  adam_options = dataclasses.replace(
    options,
    state_type=ScaleByCoatAdamState,
    seed=seed ^ _ADAM_STREAM,  # pyright: ignore[reportOperatorIssue]
  )
  iteration = NewtonSchulz(ns_coeffs, ns_steps, eps, consistent_rms)
  muon = muon_transformation(options, iteration, beta, nesterov, matrices)
  adam = adam_transformation(
    adam_options, adam_b1, adam_b2, eps, adam_eps_root, nesterov
  )
  if adam_learning_rate is None:
    adam_learning_rate = learning_rate
  descend = functools.partial(
    arguments.descend, op, mask_name="weight_decay_mask"
  )
  return optax.partition(
    {
      "muon": descend(muon, learning_rate, weight_decay, weight_decay_mask),
      "adam": descend(
        adam,
        adam_learning_rate,
        adam_weight_decay,
        adam_weight_decay_mask,
        prefix="adam_",
      ),
    },
    label,
  )
