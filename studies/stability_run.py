# SPDX-License-Identifier: Apache-2.0
"""Executes one run of `studies.stability` and summarizes it in a row.

The compiled program runs CHUNK steps per call. Its arguments include the
learning rate and the seed, so all runs of a variant share one program. The runs
are not vmapped, because kernels have no batching rule.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax.models.decoder import Decoder
from coat_jax.recipes import Formats
from train import step, watch
from train.config import TrainConfig
from train.data.batches import (
  held_out_batches,
  split_windows,
  train_iterator,
)
from train.data.tokens import TokenSource
from train.objective import objective_of
from train.optimizers import learning_rate
from train.update import update

CHUNK = 25
_LAST, _PROBES = 50, 10


class Setup(NamedTuple):
  """The configuration of a variant; its learning rate and seed are ignored."""

  config: TrainConfig
  formats: Formats | None  # Replaces the formats of the recipe.


class Programs:
  """Jitted functions that train and evaluate a variant."""

  def __init__(self, found: Setup):
    config, formats = found
    recipe = config.coat_recipe()
    if formats is not None:
      recipe = dataclasses.replace(recipe, formats=formats)
    unit = learning_rate(config)  # A schedule whose peak is 1.

    def decoder(seed):
      rngs = nnx.Rngs(jax.random.key(seed))
      return Decoder(
        config.model,
        recipe,
        dtype=jnp.dtype(config.compute),
        remat=config.remat,
        rngs=rngs,
      )

    self.graph = nnx.split(nnx.eval_shape(lambda: decoder(0)), nnx.Param)[0]

    @jax.jit
    def initial(seed):
      params = nnx.to_pure_dict(nnx.split(decoder(seed), nnx.Param)[1])
      optimizer = step.build_optimizer(config)
      return step.with_moments(config, optimizer, params)

    objective = objective_of(config.model)

    def train(state, chunk, rate, seed):
      def one(state, rows):
        optimizer = step.build_optimizer(
          config, rate=rate * unit(state.step), seed=seed
        )
        done, exact = update(
          config, self.graph, optimizer, None, state, objective.batch_of(rows)
        )
        state = step.TrainState(
          state.step + 1, done.params, done.state, exact, done.clip_state
        )
        return state, (done.loss, done.grad_norm)

      return jax.lax.scan(one, state, chunk)

    self.initial = initial
    self.train = jax.jit(train, donate_argnums=0)
    self.probe = jax.jit(watch.probe(config, self.graph))
    self.evaluate = jax.jit(step.eval_step(self.graph))


class Data:
  """The batches of each seed, which are read only once for all variants."""

  def __init__(self, source: TokenSource, config: TrainConfig):
    self._source, self._config = source, config
    self._batches: dict[int, np.ndarray] = {}
    _, rows = split_windows(source, config.seq)
    found = held_out_batches(
      rows, batch_size=config.batch, max_batches=config.eval_batches
    )
    self.held_out = [jnp.asarray(rows["tokens"]) for rows in found]

  def train(self, seed: int) -> np.ndarray:
    """Returns the training tokens of a seed, int32 [steps, batch, seq + 1]."""
    if seed not in self._batches:
      config = self._config
      batches = train_iterator(
        self._source,
        seq_len=config.seq,
        batch_size=config.batch,
        seed=seed,
      )
      rows = [next(batches)["tokens"] for _ in range(config.steps)]
      self._batches[seed] = np.stack(rows)
    return self._batches[seed]


def train_one(
  programs: Programs, config: TrainConfig, data: Data, rate: float, seed: int
) -> dict[str, Any]:
  """Trains once with the peak learning rate `rate`; returns a row's values."""
  started = time.monotonic()
  tokens = data.train(seed)
  state = programs.initial(seed)
  losses, norms, probes = [], [], []
  chunks = range(0, config.steps, CHUNK)
  every = max(len(chunks) // _PROBES, 1)
  for i, first in enumerate(chunks):
    rows = jnp.asarray(tokens[first : first + CHUNK])
    rate_and_seed = jnp.float32(rate), jnp.uint32(seed)
    state, found = programs.train(state, rows, *rate_and_seed)
    loss, norm = jax.device_get(found)
    losses, norms = [*losses, *loss.tolist()], [*norms, *norm.tolist()]
    if not np.all(np.isfinite(loss)):
      break
    if (i + 1) % every == 0:
      probes.append(_probe(programs, state, rows[-1]))
  warmup = config.optim.warmup_steps(config.steps)
  values = describe(losses, norms, warmup=warmup)
  if values["failed"] != "not finite":
    found = [programs.evaluate(state.params, x).loss for x in data.held_out]
    held_out = float(np.mean(jax.device_get(found)))
    values["held_out_loss"] = held_out if np.isfinite(held_out) else None
  return values | {
    "watch": {name: [x[name] for x in probes] for name in probes[0]}
    if probes
    else {},
    "seconds": round(time.monotonic() - started, 1),
  }


def _probe(programs: Programs, state: step.TrainState, rows: jax.Array) -> dict:
  """Computes the values of `train.watch`.

  Returns amax for all layers, and the other values for the worst layer.
  """
  found = {}
  for name, x in jax.device_get(programs.probe(state, rows)).items():
    worst = x if name == "activations_amax" else [x.max()]
    numbers = [float(f"{v:.4g}") if np.isfinite(v) else None for v in worst]
    found[name] = numbers if len(numbers) > 1 else numbers[0]
  return found


def describe(
  losses: list[float], norms: list[float], *, warmup: int
) -> dict[str, Any]:
  """Summarizes the losses and gradient norms of a run's steps."""
  x, norm = np.asarray(losses), np.asarray(norms)
  bad = np.flatnonzero(~np.isfinite(x))
  finite = x[: bad[0]] if bad.size else x
  width = min(_LAST, max(len(finite), 1))
  means = np.convolve(finite, np.ones(width) / width, "valid")
  failed, failed_at = None, None
  if bad.size:
    failed, failed_at = "not finite", int(bad[0]) + 1
  elif means[-1] > means.min() + 0.5:
    failed = "diverged"
    best = int(np.argmin(means))
    above = np.flatnonzero(means[best:] > means.min() + 0.5)
    failed_at = best + int(above[0]) + width
  return {
    "failed": failed,
    "failed_at": failed_at,
    "train_loss": None if failed == "not finite" else float(means[-1]),
    "spikes": count_spikes(finite, warmup),
    "losses": _per_chunk(finite, np.mean),
    "grad_norms": _per_chunk(norm[: len(finite)], np.median),
    "largest_grad_norms": _per_chunk(norm[: len(finite)], np.max),
  }


def _per_chunk(x: np.ndarray, reduce: Callable) -> list[float | None]:
  """Reduces each chunk of steps to one number, rounded to four digits."""
  found = [reduce(x[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
  return [float(f"{v:.4g}") if np.isfinite(v) else None for v in found]


def count_spikes(losses: np.ndarray, warmup: int) -> int:
  """Counts spikes after the warmup, as defined in `studies.stability`."""
  count, is_inside = 0, False
  for i in range(max(warmup, _LAST), len(losses)):
    before = losses[i - _LAST : i]
    is_spike = losses[i] > before.mean() + max(4 * before.std(), 0.1)
    count += is_spike and not is_inside
    is_inside = is_spike
  return int(count)
