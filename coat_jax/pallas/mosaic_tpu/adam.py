# SPDX-License-Identifier: Apache-2.0
"""Adam's step on a leaf with encoded moments, as a TPU kernel (`leaf_step`)."""

import jax

from coat_jax.ops.dispatch import kernel
from coat_jax.optimizer.adam import adam
from coat_jax.pallas.mosaic_tpu import leaf_step


def _why_not(g, stored, groups, part, p=None, **_) -> str | None:
  return leaf_step.why_not(stored, groups, part, (*jax.tree.leaves(p)[:1], g))


@kernel(_why_not)
def adam_update(g, stored, part, scalars, *, groups, interpret: bool = False):
  """Computes `optimizer.adam.adam_update`; `interpret` runs it on a CPU."""
  return leaf_step.run(adam, part, g, None, stored, scalars, groups, interpret)


@kernel(_why_not)
def adamw_step(
  p, g, stored, part, scalars, step, *, groups, interpret: bool = False
):
  """Computes `optimizer.adam.adamw_step`; `interpret` runs it on a CPU."""
  return leaf_step.run(
    adam, part, g, p, stored, (scalars, step), groups, interpret
  )
