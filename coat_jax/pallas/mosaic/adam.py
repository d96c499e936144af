# SPDX-License-Identifier: Apache-2.0
"""Adam's step on one leaf with encoded moments, in one pass over memory.

Bytes that `adamw_step` reads and writes per value, with E4M3 codes:

  16.2  f32 parameters and gradients
  10.2  bf16 parameters and gradients
  12.2  24-bit weights and bf16 gradients

A factored second moment saves 2 bytes per value. But then a second kernel
(`square_means`) reads the gradient first.

A step on 2^28 f32 parameters takes, on an H200 (jax 0.11.2):

  1.80 ms  optax.adamw
  1.10 ms  this kernel, if it rounds to nearest
  1.25 ms  this kernel, if it rounds stochastically (codec `coat`)
  1.20 ms  an earlier form of both kernels for a factored second moment,
           whichever way they round

If the kernel rounds to nearest, memory bandwidth limits its speed. If it rounds
stochastically, it reaches 86 % of this bandwidth. All multiprocessors compute
equally many tiles, and on average they finish 4 % earlier than the last one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.formats import ROOT_OF_LARGEST
from coat_jax.ops.dispatch import kernel
from coat_jax.optimizer.adam import add_means, frozen_second
from coat_jax.optimizer.step import is_factored, put_layer, take_layer
from coat_jax.pallas.mosaic import leaf_step, square_means
from coat_jax.pallas.mosaic.factors import Sizes
from coat_jax.pallas.mosaic.registers import Instructions


def _why_not(g, stored, groups, scalars, p=None, **_) -> str | None:
  if scalars.gradient_ratio is not None:
    return "the GPU kernel does not support Nesterov momentum"
  # Leave out the low bytes of a `SplitWeight`.
  arrays = *jax.tree.leaves(p)[:1], g
  if not is_factored(groups):
    return leaf_step.why_not(stored, groups, arrays)
  why_not = leaf_step.why_not(stored[:1], groups[:1], arrays)
  return why_not or Sizes.of(stored[1]).why_not()


@kernel(_why_not)
def adam_update(g, stored, part, scalars, *, groups, interpret: bool = False):
  """Computes `optimizer.adam.adam_update`; `interpret` runs it on a CPU."""
  return _run(_rule(scalars), part, g, None, stored, groups, interpret)


@kernel(_why_not)
def adamw_step(
  p, g, stored, part, scalars, step, *, groups, interpret: bool = False
):
  """Computes `optimizer.adam.adamw_step`; `interpret` runs it on a CPU."""
  rule = dataclasses.replace(
    _rule(scalars),
    grad_scale=step.grad_scale,
    update_rate=-step.learning_rate * scalars.ratio,
    decay_rate=-step.learning_rate * step.weight_decay,
  )
  return _run(rule, part, g, p, stored, groups, interpret)


def _run(rule: "_Adam", part, g, p, stored, groups, interpret: bool):
  """Runs the kernels."""
  if not is_factored(groups):
    return leaf_step.run(rule, part, g, p, stored, groups, interpret)
  layer = part.layer
  old = stored[1] if layer is None else take_layer(stored[1], layer)
  means = square_means.run(g, rule.grad_scale, old, interpret)
  new = add_means(old, means, rule)
  rule = dataclasses.replace(rule, **frozen_second())
  first, mu = leaf_step.run(
    rule, part, g, p, stored[:1], groups[:1], interpret, new
  )
  if layer is not None:
    new = put_layer(stored[1], new, layer)
  return first, (*mu, new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adam:
  """Computes `optimizer.adam.adam` and, given a parameter, updates it."""

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array
  ratio: Array
  eps_root: Array | None = None
  eps: Array
  grad_scale: Array | None = None
  update_rate: Array | None = None
  decay_rate: Array | None = None

  def apply(self, g, p, old, on: Instructions):
    """See `leaf_step.Rule`."""
    mu, nu = old
    if self.grad_scale is not None:
      g = on.in_f32(g) * self.grad_scale
    # Compute `formats.with_finite_square`. Adding 0 * g makes infinities NaN.
    # This FMA runs at twice the rate of a compare and a select. The cast to f32
    # comes later, because a bf16 instruction processes two values.
    bound = jnp.asarray(ROOT_OF_LARGEST, g.dtype)
    g = jnp.clip(g, -bound, bound) + jnp.zeros([], g.dtype) * g
    g = on.in_f32(g)
    mu = mu.times(self.b1) + self.one_minus_b1 * g
    nu = nu.times(self.b2) + self.one_minus_b2 * g * g
    inner = nu if self.eps_root is None else nu + self.eps_root
    update = mu * on.reciprocal(on.sqrt(inner) + self.eps)
    if p is None:
      return update * self.ratio, (mu, nu)
    assert self.update_rate is not None and self.decay_rate is not None
    return p + (self.update_rate * update + self.decay_rate * p), (mu, nu)


def _rule(scalars) -> _Adam:
  kept = {field.name for field in dataclasses.fields(_Adam)}
  return _Adam(**{k: v for k, v in scalars._asdict().items() if k in kept})
