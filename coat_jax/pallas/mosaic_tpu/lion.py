# SPDX-License-Identifier: Apache-2.0
"""Lion's step on a leaf with an encoded moment, as a TPU kernel."""

import jax

from coat_jax.ops.dispatch import kernel
from coat_jax.optimizer.lion import lion
from coat_jax.pallas.mosaic_tpu import leaf_step


def _why_not(p, g, stored, groups, part, **_) -> str | None:
  return leaf_step.why_not(stored, groups, part, (*jax.tree.leaves(p)[:1], g))


@kernel(_why_not)
def lion_step(
  p, g, stored, part, scalars, step, *, groups, interpret: bool = False
):
  """Computes `optimizer.lion.lion_step`; `interpret` runs it on a CPU."""
  return leaf_step.run(
    lion, part, g, p, stored, (scalars, step), groups, interpret
  )
