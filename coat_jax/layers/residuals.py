# SPDX-License-Identifier: Apache-2.0
"""Names for what layers remember, and small helpers of every custom_vjp.

Each array that a forward hands to its backward goes through `remember`, which
gives it one of `RESIDUAL_NAMES`; scalar scales too, since to compute one again
takes the operation in front of it. A `jax.checkpoint` policy can then keep or
offload them, and memory can be counted by kind:

  jax.checkpoint(
    layer,
    policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
  )

Weights and norm parameters are handed over too; they are alive anyway and carry
no name.
"""

from typing import Literal, overload

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

Kind = Literal["norm", "activation", "rope", "attention", "linear"]

RESIDUAL_NAMES = (
  "coat_norm",
  "coat_activation",
  "coat_rope",
  "coat_attention",
  "coat_linear",
)


def remember[Tree](kind: Kind, tree: Tree) -> Tree:
  """Names every array of `tree` "coat_<kind>" for checkpoint policies."""
  return jax.tree.map(lambda x: checkpoint_name(x, f"coat_{kind}"), tree)


@overload
def cotangent(gradient: Array, primal: Array) -> Array: ...
@overload
def cotangent(gradient: Array, primal: None) -> None: ...
def cotangent(gradient: Array, primal: Array | None) -> Array | None:
  """A gradient in the shape and dtype of its primal; None for None."""
  if primal is None:
    return None
  return gradient.reshape(primal.shape).astype(primal.dtype)
