# SPDX-License-Identifier: Apache-2.0
"""Restores the checkpoint of a resumed run, whose options may have changed."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import grain
import jax
from jax import P
from jax.sharding import NamedSharding

from coat_jax.optimizer import from_plain_state, sharding, to_plain_state
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.objective import trained
from train.run import checkpoint
from train.run.description import configuration
from train.step import TrainState

# The options that determine how stored moments are decoded.
_LAYOUT = ("codec", "group_size", "second")


def restore(
  path: Path,
  step: int,
  config: TrainConfig,
  abstract: TrainState,
  batches: grain.DatasetIterator,
) -> TrainState:
  """Restores a state, converted for `config`, and the position of `batches`."""
  saved = configuration(checkpoint.read_description(path, step))
  params = abstract.params
  if saved.params != config.params:
    params = weights.abstract(saved.params, params)
  same_codes = all(
    getattr(saved.optim, name) == getattr(config.optim, name)
    for name in _LAYOUT
  )
  optimizer = abstract.optimizer
  if not same_codes or saved.params != config.params:
    # A restored `Moment` gets its codec from the abstract state. If the moments
    # need no conversion, use the codec of `config`, which can differ from the
    # saved run's codec only in how it rounds.
    optim = config.optim if same_codes else saved.optim
    optimizer = _abstract_optimizer(
      dataclasses.replace(saved, optim=optim), params
    )
  # Clipping rule "global" has no state. The states of the other two rules have
  # the same structure.
  clip = () if saved.optim.clip == "global" else abstract.clip
  state = checkpoint.restore(
    path,
    step,
    abstract._replace(params=params, optimizer=optimizer, clip=clip),
    batches,
  )
  if saved.optim.clip == "global":
    state = state._replace(clip=steps.initial_clip(config, abstract))
  if saved.params != config.params:
    state = _stored_anew(state, config, abstract)
  if not same_codes:
    like, seed = abstract.optimizer, config.seed
    recode = jax.jit(
      lambda x: from_plain_state(to_plain_state(x), like, seed=seed),
      out_shardings=steps.shardings(abstract.optimizer),
    )
    state = state._replace(optimizer=recode(state.optimizer))
  return state


def _stored_anew(
  state: TrainState, config: TrainConfig, abstract: TrainState
) -> TrainState:
  """Converts a state's weights to the format that `config.params` selects."""
  adam, low = weights.without_low(state.optimizer)
  where = abstract.params, weights.without_low(abstract.optimizer)[1]

  @functools.partial(jax.jit, out_shardings=steps.shardings(where))
  def convert(params, low):
    params, low = weights.store(config.params, weights.load(params, low))
    return params, low and trained(config, low)

  params, low = convert(state.params, low)
  return state._replace(params=params, optimizer=weights.with_low(adam, low))


def _abstract_optimizer(config: TrainConfig, params: Any):
  """Builds the optimizer's abstract state, sharded like the parameters."""
  init, params = steps.build_optimizer(config).init, trained(config, params)
  if jax.tree.leaves(params)[0].sharding is None:
    return jax.eval_shape(init, params)
  codec = config.optim.moment_codec()
  size = getattr(codec.mu, "group_size", 1)  # Plain moments have no groups.

  # The new mesh may split groups of moments that share a scale, although the
  # checkpoint's mesh did not. If so, each device gets all columns of a moment.
  def with_whole_groups(p):
    mesh, spec = p.sharding.mesh, p.sharding.spec
    if p.sharding.shard_shape(p.shape)[-1] % size == 0:
      return p
    rows = (*spec, *(None,) * p.ndim)[: p.ndim - 1]
    return p.update(sharding=NamedSharding(mesh, P(*rows)))

  params = jax.tree.map(with_whole_groups, params)
  return sharding.abstract_state(init, params)
