# SPDX-License-Identifier: Apache-2.0
"""Checks for early signs that low precision will harm training: `--watch N`.

Every N steps a separate program, the probe, reads the state and runs the
forward pass once more, on the step's first microbatch. The training step itself
does not change. These values are written to metrics.jsonl as `watch`:

  activations_amax       largest magnitude of each layer's output
  activations_kurtosis   E[x^4] / E[x^2]^2 of each layer's output: 3 for a
                         normal distribution; large if there are outliers
  activations_zeroed     share of each layer's output that becomes zero in the
                         recipe's format with one scale per tensor (E4M3 for
                         the `bf16` recipe)
  mu_saturated           share of the first moments' codes that have the largest
                         magnitude
  mu_zeroed              share of the first moments' codes that are zero
  mu_power               smallest power k of dynamic range expansion
  nu_saturated, nu_zeroed, nu_power
                         the same for second moments; where a second moment is
                         zero, the update is divided by eps
  grad_norm              global norm of the step's gradients

coat_lion has no second moments, and coat_muon has them only for the parameters
that AdamW updates. Only codec coat has powers. A forward pass takes a third of
a step's time, so `--watch 100` costs 0.3 % of the time.

From the fourth probe on, each value is compared with its median over the
previous ten probes, or over all previous probes if there are fewer than ten.
`RULES` sets limits relative to these medians, and the run prints a line for
each value beyond its limit. If there is a value for each layer, the line names
the worst layer.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.codecs.factored import Factored
from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.models.batch import Batch
from coat_jax.models.remat import layer_forward
from coat_jax.numerics.formats import is_fp8, qmax
from coat_jax.numerics.qtensor import quantize, split_groups
from coat_jax.optimizer.masks import is_encoded
from coat_jax.optimizer.state import find_states
from train import step
from train.config import TrainConfig
from train.objective import objective_of
from train.update import microbatches

# Maps each name to its values: a single value, or one per layer.
Found = dict[str, list[float | None]]


class Rule(NamedTuple):
  """The limit for a value: `factor` * median + `plus`."""

  text: str  # The printed explanation.
  factor: float = 1.0  # If below 1, the limit is a lower bound.
  plus: float = 0.0

  def is_broken(self, value: float, usual: float) -> bool:
    """Returns whether a value is beyond its limit; `usual` is the median."""
    limit = usual * self.factor + self.plus
    return value < limit if self.factor < 1 else value > limit


_OUTLIERS = "outliers take up most of the range"
_EXPLODE = "where second moments are zero, updates are divided by eps"
_LOST = "moments below the range of the codes become zero"
RULES = {
  "activations_amax": Rule(_OUTLIERS, factor=2),
  "activations_kurtosis": Rule(_OUTLIERS, factor=2),
  "activations_zeroed": Rule("small activations become zero", plus=0.05),
  "mu_saturated": Rule("groups hold few distinct values", plus=0.05),
  "nu_saturated": Rule("groups hold few distinct values", plus=0.05),
  "mu_zeroed": Rule(_LOST, plus=0.05),
  "nu_zeroed": Rule(_EXPLODE, plus=0.05),
  "mu_power": Rule("groups span a wider range", factor=0.5),
  "nu_power": Rule("groups span a wider range", factor=0.5),
  "grad_norm": Rule("the loss may spike", factor=4),
}
# A value is compared with the finite values of the last `_COMPARED` probes, if
# there are at least `_FEWEST` such values.
_COMPARED, _FEWEST = 10, 3


def probe(
  config: TrainConfig, graph: nnx.GraphDef
) -> Callable[[step.TrainState, step.Rows], dict[str, jax.Array]]:
  """Builds the probe, a function of (state, rows).

  The probe returns all values except `grad_norm`.
  """

  def find(state, rows):
    batch: Any = objective_of(config.model).batch_of(rows)
    if config.accumulate > 1:
      parts = microbatches(batch, config.accumulate)
      batch = jax.tree.map(lambda x: x[0], parts)
    found = _of_layers(nnx.merge(graph, state.params), batch)
    return found | of_moments(state.optimizer)

  return find


def of_moments(optimizer: Any) -> dict[str, jax.Array]:
  """Computes statistics of the codes in an optimizer's state."""
  states = find_states("train", optimizer)
  found = {}
  for name in ("mu", "nu"):
    moments = [getattr(x, name) for x in states if hasattr(x, name)]
    encoded = [x for m in moments for x in m.leaves() if is_encoded(x)]
    if encoded:
      values = _of_codes(moments[0].codec, encoded)
      found |= {f"{name}_{key}": x.reshape(1) for key, x in values.items()}
  return found


def _of_layers(model: Any, batch: Batch) -> dict[str, jax.Array]:
  """Computes statistics of each layer's output."""
  forward = layer_forward(model, batch.input_segments)
  values = model.layers.attention.active_recipe.formats.values

  def with_statistics(carry, layer, kind):
    x, routing = forward(carry, layer, kind)
    return (x, routing), _of_values(x.astype(jnp.float32), values)

  scan = nnx.scan(
    with_statistics, in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0)
  )
  start = model.start(batch.inputs, batch.input_segments)
  return scan(start, model.layers, model.kinds_of_layers)[1]


def _of_values(x: jax.Array, dtype) -> dict[str, jax.Array]:
  amax = jnp.max(jnp.abs(x))
  square = jnp.square(x / jnp.where(amax > 0, amax, 1))  # x^4 could overflow.
  codes = quantize(x, group_size=None, dtype=dtype).qvalue
  zeroed = (codes.astype(jnp.float32) == 0) & (x != 0)
  fourth = jnp.mean(jnp.square(square))
  return {
    "activations_amax": amax,
    "activations_kurtosis": fourth / jnp.square(jnp.mean(square)),
    "activations_zeroed": jnp.mean(zeroed),
  }


def _of_codes(
  group: GroupCodec, encoded: list[Encoded]
) -> dict[str, jax.Array]:
  """Computes statistics of a moment's codes; {} if it has no 8-bit codes."""
  if isinstance(group, Factored) or encoded[0].codes.dtype.itemsize > 1:
    return {}
  dtype = encoded[0].codes.dtype
  largest = qmax(dtype) if is_fp8(dtype) else float(jnp.iinfo(dtype).max)
  magnitudes = [jnp.abs(x.codes.astype(jnp.float32)) for x in encoded]
  size = sum(x.size for x in magnitudes)

  def share(is_chosen: Callable) -> jax.Array:
    return sum(jnp.sum(is_chosen(x), dtype=jnp.float32) for x in magnitudes) / (
      jnp.float32(size)
    )

  found = {
    "saturated": share(lambda x: x == largest),
    "zeroed": share(lambda x: x == 0),
  }
  if isinstance(group, ExpandedFP8):
    powers = []
    for x, magnitude in zip(encoded, magnitudes, strict=True):
      occupied = jnp.any(split_groups(magnitude, group.group_size) > 0, axis=-1)
      power = jnp.where(occupied, group.power(x.amax, x.range), jnp.inf)
      powers.append(jnp.min(power))
    found["power"] = jnp.min(jnp.stack(powers))
  return found


class Watcher:
  """Probes a run, and compares the values with those of earlier probes."""

  def __init__(
    self,
    config: TrainConfig,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    abstract: step.TrainState,
    rows: Any,
  ):
    """Compiles the probe."""
    find = probe(config, graph)
    self._program = step.compile_on(mesh, find, abstract, rows)
    self._earlier = []

  def look(
    self, state: step.TrainState, rows: Any, grad_norm: float
  ) -> tuple[Found, list[str]]:
    """Probes a state; returns the values, and lines about broken rules."""
    values = jax.device_get(self._program(state, rows))
    found = {name: _numbers(x) for name, x in values.items()}
    found["grad_norm"] = _numbers([grad_norm])
    said = drifts(self._earlier, found)
    self._earlier = [*self._earlier, found][-_COMPARED:]
    return found, said


def _numbers(values: Any) -> list[float | None]:
  """Rounds to six digits; replaces inf and NaN, which JSON lacks, with None."""
  return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values]


def drifts(earlier: list[Found], found: Mapping[str, list]) -> list[str]:
  """Compares values with earlier ones; returns a line for each broken rule."""
  said = []
  for name, rule in RULES.items():
    broken = []
    for i, value in enumerate(found.get(name, ())):
      before = [x[name][i] for x in earlier[-_COMPARED:] if name in x]
      before = [x for x in before if x is not None]
      if value is None or len(before) < _FEWEST:
        continue
      usual = statistics.median(before)
      if rule.is_broken(value, usual):
        off = abs(value - usual) / (abs(usual) + 1e-30)
        broken.append((off, i, value, usual, len(before)))
    if broken:
      _, i, value, usual, count = max(broken)
      where = f" of layer {i}" if len(found[name]) > 1 else ""
      said.append(
        f"watch: {name}{where} is {value:.4g}, but the median of the last "
        f"{count} probes is {usual:.4g}: {rule.text}"
      )
  return said
