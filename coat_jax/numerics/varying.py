# SPDX-License-Identifier: Apache-2.0
"""Makes arrays inside `jax.shard_map` vary over the same mesh axes."""

import jax
from jax import Array, lax


def varying[Tree](tree: Tree) -> Tree:
  """Casts all arrays to vary over each mesh axis that one of them varies over.

  If an array does not vary over a mesh axis, its gradient must be summed over
  this axis. The transpose of the cast computes this sum, in the array's dtype.
  So a custom gradient must return only the device's contribution. The cast does
  nothing outside `shard_map` or with check_vma=False.
  """

  def axes_of(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying

  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, Array)]
  names = frozenset().union(*map(axes_of, arrays))

  def cast(x):
    missing = tuple(sorted(names - axes_of(x))) if isinstance(x, Array) else ()
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)
