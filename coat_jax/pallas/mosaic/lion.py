# SPDX-License-Identifier: Apache-2.0
"""Lion's step on one leaf with an encoded moment, in one pass over memory.

Bytes that `lion_step` reads and writes per value, with E4M3 codes:

  14.1  f32 parameters and gradients
   8.1  bf16 parameters and gradients
  10.1  24-bit weights and bf16 gradients

On an H200 (jax 0.11.2), a step on 2^28 parameters takes 0.91 ms in f32 and
0.78 ms in BF16.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.ops.dispatch import kernel
from coat_jax.pallas.mosaic import leaf_step
from coat_jax.pallas.mosaic.moment_codecs import with_sign
from coat_jax.pallas.mosaic.registers import Instructions


def _why_not(p, g, stored, groups, **_) -> str | None:
  # Leave out the low bytes of a `SplitWeight`.
  return leaf_step.why_not(stored, groups, (jax.tree.leaves(p)[0], g))


@kernel(_why_not)
def lion_step(
  p, g, stored, part, scalars, step, *, groups, interpret: bool = False
):
  """Computes `optimizer.lion.lion_step`; `interpret` runs it on a CPU."""
  rule = _Lion(
    **scalars._asdict(),
    grad_scale=step.grad_scale,
    update_rate=-step.learning_rate,
    decay_rate=-step.learning_rate * step.weight_decay,
  )
  return leaf_step.run(rule, part, g, p, stored, groups, interpret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lion:
  """Computes `optimizer.lion.lion` and updates the parameter."""

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array
  grad_scale: Array | None = None
  update_rate: Array
  decay_rate: Array

  def apply(self, g, p, old, on: Instructions):
    """See `leaf_step.Rule`."""
    (mu,) = old
    g = on.in_f32(g)
    if self.grad_scale is not None:
      g = g * self.grad_scale
    mixed = mu.times(self.b1) + self.one_minus_b1 * g
    # The update is the sign of `mixed`, or `mixed` itself if it is zero or NaN.
    update = jnp.where(
      jnp.abs(mixed) > 0, with_sign(jnp.ones_like(mixed), mixed), mixed
    )
    mu = mu.times(self.b2) + self.one_minus_b2 * g
    return p + (self.update_rate * update + self.decay_rate * p), (mu,)
