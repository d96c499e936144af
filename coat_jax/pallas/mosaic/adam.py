# SPDX-License-Identifier: Apache-2.0
"""An Adam step on one leaf with encoded moments, in one pass over memory.

These are `adam.adam_update` and `adam.adamw_step` as one kernel (`leaf_step`).
With f32 parameters and gradients and E4M3 codes a step reads and writes 16.2
bytes per value (p twice, g once, two codes twice); with bf16 10.2 bytes; with
24-bit weights and bf16 gradients 12.2 bytes.

One H200, 2026-11-21, jax 0.11.2, 2^28 parameters, donated, one run (ms):

  codec, rounding         f32    bf16    instructions per value (f32, bf16)
                                          then       since 2026-11-23
  coat nearest            1.11   0.99     58    77    54    62
  coat stochastic         1.56   1.67    108   126    88    92
  log8 stochastic         1.29   1.38    104   121    86    91
  optax.adamw (XLA)       1.81   0.92

The version since 2026-11-23 was compiled for an H200 but not timed. At 90 and
95 instructions, coat stochastic took 1.25 and 1.31 ms and log8 1.22 and 1.10.

With f32 and rounding to nearest, memory bandwidth is the limit. With stochastic
rounding the instructions are. For coat 13 of them are special functions, which
take 8 clocks each: per value four logarithms, four powers, a root and a
reciprocal. The registers (116 to 126 per thread; log8 80 to 95) allow 16 warps
(log8 20 to 24) per multiprocessor. docs/log lists what we tried in vain.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.formats import ROOT_OF_LARGEST
from coat_jax.ops.dispatch import kernel
from coat_jax.pallas.mosaic import leaf_step
from coat_jax.pallas.mosaic.registers import Instructions


def _why_not(g, stored, groups, scalars, p=None, **_) -> str | None:
  if scalars.gradient_ratio is not None:
    return "the kernel has no Nesterov momentum"
  # The first array of a parameter; a `SplitWeight` also has low bytes.
  return leaf_step.why_not(stored, groups, (*jax.tree.leaves(p)[:1], g))


@kernel(_why_not)
def adam_update(
  g,
  stored,
  part,
  scalars,
  *,
  groups,
  interpret: bool = False,
):
  """`adam.adam_update`. With `interpret` it runs on a CPU, slowly."""
  return leaf_step.run(_rule(scalars), part, g, None, stored, groups, interpret)


@kernel(_why_not)
def adamw_step(
  p,
  g,
  stored,
  part,
  scalars,
  step,
  *,
  groups,
  interpret: bool = False,
):
  """`adam.adamw_step`. With `interpret` it runs on a CPU, slowly."""
  rule = dataclasses.replace(
    _rule(scalars),
    grad_scale=step.grad_scale,
    update_rate=-step.learning_rate * scalars.ratio,
    decay_rate=-step.learning_rate * step.weight_decay,
  )
  return leaf_step.run(rule, part, g, p, stored, groups, interpret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adam:
  """`adam.adam`, followed by the update of the parameter if there is one."""

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
    # `formats.with_finite_square`, but with one FMA instead of a compare and a
    # select, which run at half the rate. The definition does not use this form
    # because XLA would then keep a copy of all gradients.
    # In bf16 this handles two values at a time.
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
