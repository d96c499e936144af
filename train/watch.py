# SPDX-License-Identifier: Apache-2.0
"""Early signs that low precision is about to hurt: `--watch N`.

Every N steps a separate program reads the state and runs the forward pass on
the step's batch once more. The training step itself does not change. The
program computes

  activations_amax       largest magnitude of each layer's output
  activations_kurtosis   E[x^4] / E[x^2]^2 of that output: 3 for a normal
                         distribution; large if outliers take up the range
  activations_zeroed     share of its values that round to zero with one scale
                         per tensor in the recipe's format for values (in recipe
                         bf16: E4M3)
  mu_saturated, nu_      share of the stored codes with the largest magnitude
  mu_zeroed, nu_         share of codes that are zero; a second moment of zero
                         divides its update by eps
  mu_power, nu_          smallest power k of a group, for codecs with powers
                         (coat_lion has no nu_; for coat_muon these are the
                         parameters that AdamW steps)
  grad_norm              global norm of the step's gradients

and writes them as `watch` into metrics.jsonl. A forward pass takes a third of a
step: with N = 100 it costs 0.3 % of the time.

After three probes, `RULES` compare each value with the median of up to ten
earlier probes. The run prints a line if the value is above twice the median
(kurtosis and amax; four times for the gradients' norm), below half the median
(k), or more than 0.05 above it (shares). The line names the worst layer.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.models.batch import Batch
from coat_jax.models.remat import layer_forward
from coat_jax.numerics.formats import is_fp8, qmax
from coat_jax.numerics.qtensor import quantize, split_groups
from coat_jax.optimizer.masks import is_encoded
from coat_jax.optimizer.state import MomentState, find_states
from train import step
from train.config import TrainConfig
from train.objective import objective_of
from train.update import microbatches

# Maps a name to one value, or to one value per layer.
Found = dict[str, list[float | None]]


class Rule(NamedTuple):
  """The limit of a value: `factor` * median + `plus`."""

  text: str  # The meaning, for the printed line.
  factor: float = 1.0  # Below 1 it makes a lower limit.
  plus: float = 0.0

  def is_broken(self, value: float, usual: float) -> bool:
    """Returns whether a value has drifted from the median."""
    limit = usual * self.factor + self.plus
    return value < limit if self.factor < 1 else value > limit


_OUTLIERS = "outliers take the range of its codes"
_EXPLODE = "updates with second moments of zero are divided by eps"
_LOST = "moments below the codes' range are lost"
RULES = {
  "activations_amax": Rule(_OUTLIERS, factor=2),
  "activations_kurtosis": Rule(_OUTLIERS, factor=2),
  "activations_zeroed": Rule("small activations are lost", plus=0.05),
  "mu_saturated": Rule("groups hold few distinct values", plus=0.05),
  "nu_saturated": Rule("groups hold few distinct values", plus=0.05),
  "mu_zeroed": Rule(_LOST, plus=0.05),
  "nu_zeroed": Rule(_EXPLODE, plus=0.05),
  "mu_power": Rule("groups span more than before", factor=0.5),
  "nu_power": Rule("groups span more than before", factor=0.5),
  "grad_norm": Rule("the loss may spike", factor=4),
}
_COMPARED, _FEWEST = 10, 3


def probe(
  config: TrainConfig, graph: nnx.GraphDef
) -> Callable[[step.TrainState, step.Rows], dict[str, jax.Array]]:
  """Builds the function of (state, rows) that computes all but `grad_norm`."""

  def find(state, rows):
    batch: Any = objective_of(config.model).batch_of(rows)
    if config.accumulate > 1:
      parts = microbatches(batch, config.accumulate)
      batch = jax.tree.map(lambda x: x[0], parts)
    found = _of_layers(nnx.merge(graph, state.params), batch)
    return found | of_moments(state.optimizer)

  return find


def of_moments(optimizer: Any) -> dict[str, jax.Array]:
  """Computes statistics of all codes that an optimizer's state stores."""
  states = find_states("train", optimizer, MomentState)
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
  if not encoded or encoded[0].codes.dtype.itemsize > 1:
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
  """Probes a run, and compares each probe with earlier ones."""

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
    self._every, self._earlier = config.watch, []

  def is_due(self, done: int) -> bool:
    """Returns whether a probe is due after this many steps."""
    return done % self._every == 0

  def look(
    self, state: step.TrainState, rows: Any, grad_norm: float
  ) -> tuple[Found, list[str]]:
    """Probes a state; returns its values, and lines about drifts."""
    values = jax.device_get(self._program(state, rows))
    found = {name: _numbers(x) for name, x in values.items()}
    found["grad_norm"] = _numbers([grad_norm])
    said = drifts(self._earlier, found)
    self._earlier = [*self._earlier, found][-_COMPARED:]
    return found, said


def _numbers(values: Any) -> list[float | None]:
  """Rounds to six digits; None for numbers that JSON cannot store."""
  return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values]


def drifts(earlier: list[Found], found: Mapping[str, list]) -> list[str]:
  """Compares a probe with earlier ones; returns a line for each broken rule."""
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
        f"watch: {name}{where} is {value:.4g}, and was {usual:.4g} (median of "
        f"{count}): {rule.text}"
      )
  return said
