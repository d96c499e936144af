# SPDX-License-Identifier: Apache-2.0
"""Provides pairs of an optax optimizer and our replacement, and their steps.

Steps are traced, not compiled, so that checking all pairs is fast.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from coat_jax import (
  coat_adamw,
  coat_lion,
  coat_muon,
  codecs,
  encoded,
  scale_by_coat_adam,
  scale_by_coat_lion,
  scale_by_coat_muon,
)

OPTIONS: dict[str, Any] = dict(
  codec=codecs.coat(4), quantize_mask=lambda path, leaf: leaf.ndim > 0
)


class Case(NamedTuple):
  """Factories of an optax optimizer and our replacement, and their options."""

  theirs: Callable[..., optax.GradientTransformation]
  ours: Callable[..., optax.GradientTransformation]
  options: dict[str, Any]


def encode(theirs, **options):
  @functools.wraps(theirs)
  def ours(**kwargs):
    return encoded(theirs(**kwargs), **OPTIONS)

  return Case(theirs, ours, {"learning_rate": 1e-2} | options)


def replace(ours, theirs, **options):
  return Case(theirs, functools.partial(ours, **OPTIONS), options)


def mechanized_adamw(learning_rate):
  return contrib.mechanize(optax.adamw(learning_rate))


def schedule_free_adam(learning_rate):
  return contrib.schedule_free(optax.adam(learning_rate), learning_rate)


def adam_with_plateau(learning_rate):
  plateau = contrib.reduce_on_plateau()
  return optax.chain(optax.adam(learning_rate), plateau)


def lbfgs(learning_rate):
  return optax.lbfgs(learning_rate, linesearch=None)


def low_rank_adam(learning_rate):
  """Returns GaLore, whose inner optimizer's state is encoded."""
  adam = encoded(optax.scale_by_adam(), **OPTIONS)
  return optax.chain(
    contrib.scale_by_galore(2, base_optimizer=adam),
    optax.scale_by_learning_rate(learning_rate),
  )


OURS = {
  "coat_lion": replace(coat_lion, optax.lion, learning_rate=1e-2),
  "coat_muon": replace(coat_muon, contrib.muon, learning_rate=1e-2),
  "coat_adamw": replace(coat_adamw, optax.adamw, learning_rate=1e-2),
  "scale_by_coat_adam": replace(scale_by_coat_adam, optax.scale_by_adam),
  "scale_by_coat_lion": replace(scale_by_coat_lion, optax.scale_by_lion),
  "scale_by_coat_muon": replace(
    scale_by_coat_muon, contrib.scale_by_muon, ns_steps=2
  ),
  "galore": Case(
    lambda learning_rate: contrib.galore(learning_rate, rank=2),
    low_rank_adam,
    {"learning_rate": 1e-2},
  ),
}
NAMES = (
  "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lamb lars"
  " lion nadam nadamw novograd optimistic_adam_v2 radam rmsprop rprop sm3 yogi"
)
# The oldest optax that we support, 0.2.6, lacks signum and galore.
if hasattr(optax, "signum"):
  NAMES += " signum"
if not hasattr(contrib, "galore"):
  del OURS["galore"]
CONTRIBUTED = (
  "acprop ademamix simplified_ademamix adopt dadapt_adamw momo momo_adam muon"
  " prodigy schedule_free_adamw sophia"
)
ENCODED = (
  {name: encode(getattr(optax, name)) for name in NAMES.split()}
  | {name: encode(getattr(contrib, name)) for name in CONTRIBUTED.split()}
  | {
    "momentum": encode(optax.sgd, momentum=0.9),
    "nesterov": encode(optax.sgd, momentum=0.9, nesterov=True),
    "rmsprop_momentum": encode(optax.rmsprop, momentum=0.9),
    "adafactor": encode(optax.adafactor, momentum=0.9),
    "optimistic": encode(optax.optimistic_gradient_descent),
    "lbfgs": encode(lbfgs),
    "mechanize": encode(mechanized_adamw),
    "schedule_free": encode(schedule_free_adam),
    "plateau": encode(adam_with_plateau),
  }
)
CASES = OURS | ENCODED
MATRICES_ONLY = ("scale_by_coat_muon",)


def tree(name, dtype="float32"):
  params = {
    "w": jnp.linspace(-1, 1, 30, dtype=dtype).reshape(3, 10),
    "u": jnp.ones((4, 8), dtype),
    "v": jnp.array([-1, 10, 1], dtype),
    "x": jnp.ones((2, 3, 4), dtype),
    "s": jnp.ones((), dtype),
  }
  if name == "sm3":
    del params["s"]  # Optax's sm3 has no accumulator for a scalar.
  if name in MATRICES_ONLY:
    params = {key: x for key, x in params.items() if x.ndim == 2}
  return params


def objective(params):
  return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def updater(name, solver):
  """Returns a solver that adds the extra arguments of optax's tests."""
  solver = optax.with_extra_args_support(solver)

  def update(grads, state, params=None, **extra):
    if name in ("momo", "momo_adam", "plateau"):
      extra["value"] = jnp.float32(1)
    if name == "sophia":
      extra["obj_fn"] = objective
    return solver.update(grads, state, params, **extra)

  return optax.GradientTransformationExtraArgs(solver.init, update)


def shapes(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def traced(f, *args):
  return shapes(jax.eval_shape(f, *args))


def step(solver, params, grads, **extra):
  """Returns shapes and dtypes of the updates, the first state and the next."""

  def run(params, grads):
    state = solver.init(params)
    return state, solver.update(grads, state, params, **extra)

  state, (updates, new) = traced(run, params, grads)
  return updates, state, new


def labels(params):
  return {key: key not in ("s", "v") for key in params}


WRAPPERS = {
  "chain": lambda tx, p: optax.chain(optax.clip_by_global_norm(1.0), tx),
  "masked": lambda tx, p: optax.masked(tx, labels(p)),
  "partition": lambda tx, p: optax.partition(
    {True: tx, False: optax.sgd(1e-2)}, labels(p)
  ),
  "multi_steps": lambda tx, p: optax.MultiSteps(
    tx, every_k_schedule=2
  ).gradient_transformation(),
  "apply_if_finite": lambda tx, p: optax.apply_if_finite(tx, 3),
  "ema": lambda tx, p: optax.chain(tx, optax.ema(0.9)),
  "conditionally": lambda tx, p: optax.transforms.conditionally_transform(
    tx, lambda step, **extra: step > 1
  ),
}
