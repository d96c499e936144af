# SPDX-License-Identifier: Apache-2.0
"""What a run's memory holds: optimizer states, and activations for backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Var

from coat_jax.state import state_bytes, state_report
from train.config import TrainConfig
from train.model import loss_fn
from train.step import TrainState, build_graph, build_optimizer, initial_state


def report_state(config: TrainConfig, state: TrainState) -> dict:
  """Reports how well the moments fit their codes.

  Args:
    config: The run's, with report_state on.
    state: Its state.

  Returns:
    A line for metrics.jsonl: `state` as of `coat_jax.state.state_report`, and
    for codec coat `powers`: for each moment, how many groups have which power
    k, by sixteenths.
  """
  codec = config.optim.moment_codec()
  row = {
    "state": state_report(state.optimizer, codec=codec, reference=state.exact)
  }
  if codec.name == "coat":
    row["powers"] = _count_powers(state)
  return row


def _count_powers(state: TrainState) -> dict[str, dict[int, int]]:
  """Counts k by sixteenths; groups of nothing but zeros have none."""
  is_adam = lambda x: hasattr(x, "mu_range")  # noqa: E731
  parts = jax.tree.leaves(state.optimizer, is_leaf=is_adam)
  (adam,) = filter(is_adam, parts)
  counts = {}
  for name in ("mu", "nu"):
    total = np.zeros(256, np.int64)
    trees = getattr(adam, f"{name}_range"), getattr(adam, f"{name}_amax")
    for power, amax in zip(*map(jax.tree.leaves, trees), strict=True):
      if power.ndim:  # A scalar stands in where a leaf stays f32.
        used = np.asarray(power)[np.asarray(amax) > 0]
        total += np.bincount(used.ravel(), minlength=256)
    counts[name] = {int(k): int(total[k]) for k in np.flatnonzero(total)}
  return counts


def state_bytes_per_param(config: TrainConfig) -> float:
  """Bytes of the optimizer's state a parameter, from abstract shapes."""
  state = jax.eval_shape(lambda: initial_state(config, build_optimizer(config)))
  return state_bytes(state.optimizer).bytes_per_param


def remembered_bytes(config: TrainConfig) -> float:
  """Counts what one layer remembers for its backward, per token.

  Traces the gradient of two and of one layer, for two sequences and for one,
  and counts each distinct array that the forward hands to the backward. In the
  difference of differences only what grows with both is left: no parameters,
  no embedding, no loss. Nothing is computed.

  Args:
    config: The run's.

  Returns:
    Bytes per token and layer, scales included.
  """

  def count(num_layers: int, batch: int) -> int:
    model = dataclasses.replace(config.model, num_layers=num_layers)
    smaller = dataclasses.replace(config, model=model)
    graph = build_graph(smaller)
    abstract = jax.eval_shape(
      lambda: initial_state(smaller, build_optimizer(smaller)).params
    )
    tokens = jax.ShapeDtypeStruct((batch, config.seq + 1), jnp.int32)

    def remembered(params, tokens):
      loss_of = lambda p: loss_fn(nnx.merge(graph, p), tokens)  # noqa: E731
      return jax.tree.leaves(jax.vjp(loss_of, params)[1])

    jaxpr = jax.make_jaxpr(remembered)(abstract, tokens).jaxpr
    arrays = {x for x in jaxpr.outvars if isinstance(x, Var)}
    arrays -= {*jaxpr.invars, *jaxpr.constvars}
    return sum(x.aval.size * x.aval.dtype.itemsize for x in arrays)

  layer_2 = count(2, 2) - count(1, 2)
  layer_1 = count(2, 1) - count(1, 1)
  return (layer_2 - layer_1) / config.seq
