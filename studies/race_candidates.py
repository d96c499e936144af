# SPDX-License-Identifier: Apache-2.0
"""The optimizers that `studies.codec_race` compares, and their codecs.

Learning rates and weight decays come from the preset, which was tuned for
AdamW. The updates of Lion and momentum differ in magnitude from AdamW's, so the
learning rates of these two are multiplied by a factor. Their weight decays are
divided by this factor, so that weights decay as fast as with AdamW.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from coat_jax import (
  coat_adamw,
  coat_lion,
  coat_muon,
  codecs,
  encoded,
)
from coat_jax.models import model_matrices
from studies import race_weights
from train import step
from train.config import TrainConfig
from train.optimizers import learning_rate

_RACE = "studies.race_codecs"
_RESET = 250
# Factors for the preset's learning rate; 1 for other optimizers.
_FACTORS = {"lion": 0.1, "momentum": 100.0}


@dataclasses.dataclass(frozen=True)
class Candidate:
  """An optimizer and the codec of its moments.

  The optimizer "resets" is AdamW with moments that restart from 0 every 250
  steps. "lion, encoded" and "momentum" are optax's optimizers, wrapped by
  `encoded`. `weights` says how AdamW stores its weights; None means f32.
  """

  codec: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  optimizer: Literal[
    "adamw", "resets", "lion", "lion, encoded", "momentum", "muon"
  ] = "adamw"
  weights: race_weights.Storage | None = None

  def build(self) -> codecs.MomentCodec:
    return codecs.build(self.codec, **self.options)


CANDIDATES = {
  "float32": Candidate("float32"),
  "coat": Candidate("coat"),
  "log8": Candidate("log8"),
  "int8": Candidate("int8"),
  "companded": Candidate(f"{_RACE}:companded"),
  "log4": Candidate(f"{_RACE}:log4"),
  "e2m1": Candidate(f"{_RACE}:e2m1"),
  "coat, factored": Candidate("coat", {"second": "factored"}),
  "e2m1 m, factored v": Candidate(f"{_RACE}:e2m1_factored"),
  "companded, nearest": Candidate(
    f"{_RACE}:companded", {"rounding": "nearest"}
  ),
  "coat, nearest": Candidate("coat", {"rounding": "nearest"}),
  "coat, nearest, resets": Candidate(
    "coat", {"rounding": "nearest"}, optimizer="resets"
  ),
  "float32, resets": Candidate("float32", optimizer="resets"),
  "E4M3 weights, fed back": Candidate("float32", weights="E4M3, fed back"),
  "E4M3 weights, stochastic": Candidate("float32", weights="E4M3, stochastic"),
  "BF16 weights, stochastic": Candidate("float32", weights="BF16, stochastic"),
  "muon, float32": Candidate("float32", optimizer="muon"),
  "muon, coat": Candidate("coat", optimizer="muon"),
  "muon, int8": Candidate("int8", optimizer="muon"),
  "lion, float32": Candidate("float32", optimizer="lion"),
  "lion, coat": Candidate("coat", optimizer="lion"),
  "lion, encoded coat": Candidate("coat", optimizer="lion, encoded"),
  "momentum, float32": Candidate("float32", optimizer="momentum"),
  "momentum, encoded coat": Candidate("coat", optimizer="momentum"),
}


class _Resets(NamedTuple):
  """The number of steps so far, and the state of the wrapped optimizer."""

  count: jax.Array
  inner: optax.OptState


def with_resets(
  tx: optax.GradientTransformation, period: int
) -> optax.GradientTransformation:
  """Resets the state of `tx` every `period` steps (arXiv:2603.16731)."""

  def init(params):
    return _Resets(jnp.zeros([], jnp.int32), tx.init(params))

  def update(grads, state, params=None):
    restart, fresh = state.count % period == 0, tx.init(params)
    inner = jax.tree.map(
      lambda new, old: jnp.where(restart, new, old), fresh, state.inner
    )
    updates, inner = tx.update(grads, inner, params)
    return updates, _Resets(state.count + 1, inner)

  return optax.GradientTransformation(init, update)


def transformation(
  candidate: Candidate, config: TrainConfig, seed: jax.Array
) -> optax.GradientTransformation:
  """Builds the optimizer of a candidate, with clipping."""
  tx = _unclipped(candidate, config, seed)
  return optax.chain(optax.clip_by_global_norm(config.optim.grad_clip), tx)


def _unclipped(
  candidate: Candidate, config: TrainConfig, seed: jax.Array
) -> optax.GradientTransformation:
  optim, codec = config.optim, candidate.build()
  factor = _FACTORS.get(candidate.optimizer.split(",")[0], 1.0)
  schedule = learning_rate(config)

  def rate(count):
    return factor * schedule(count)

  decay = optim.weight_decay / factor
  if candidate.weights is not None:
    return race_weights.adamw(
      rate,
      optim.b1,
      optim.b2,
      optim.eps,
      weight_decay=decay,
      decays=step.decays,
      storage=candidate.weights,
      seed=seed,
    )
  if candidate.optimizer == "adamw":
    return coat_adamw(
      rate,
      optim.b1,
      optim.b2,
      optim.eps,
      weight_decay=decay,
      mask=step.decays,
      codec=codec,
      seed=seed,
    )
  if candidate.optimizer == "lion":
    return coat_lion(
      rate, weight_decay=decay, mask=step.decays, codec=codec, seed=seed
    )
  if candidate.optimizer == "muon":
    return coat_muon(
      rate,
      beta=optim.momentum,
      eps=optim.eps,
      weight_decay=decay,
      weight_decay_mask=step.decays,
      adam_b1=optim.b1,
      adam_b2=optim.b2,
      adam_weight_decay=decay,
      adam_weight_decay_mask=step.decays,
      consistent_rms=0.2,
      matrices=model_matrices(config.model),
      codec=codec,
      seed=seed,
    )
  if candidate.optimizer == "resets":
    adam = optax.scale_by_adam(optim.b1, optim.b2, optim.eps)
    scaled = with_resets(encoded(adam, codec, seed=seed), _RESET)
  elif candidate.optimizer == "momentum":
    scaled = encoded(optax.trace(0.9), codec, seed=seed)
  else:
    scaled = encoded(optax.scale_by_lion(), codec, seed=seed)
  return optax.chain(
    scaled,
    optax.add_decayed_weights(decay, step.decays),
    optax.scale_by_learning_rate(rate),
  )
