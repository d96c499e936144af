# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step on each device's part of a leaf.

XLA partitions a step in plain JAX by itself, but no kernel. Where it is known
how a leaf lies on its mesh, the step runs inside `jax.shard_map`: nothing moves
between devices, and a device draws the random words of its own rows and columns
of the whole leaf, so that the result does not depend on the mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, P
from jax.sharding import NamedSharding

from coat_jax.optimizer.moments import Groups, Moments


def shardings_of(
  op: str, shardings: Any, resting: Sequence[Moments]
) -> list[NamedSharding | None]:
  """How each leaf lies, or None where that is not known.

  Args:
    op: the public function that asks, for error messages.
    shardings: tree of `NamedSharding`s or None.
    resting: moments of the leaves; on explicit axes their types say it.

  Raises:
    TypeError: a leaf of `shardings` is no `NamedSharding`.
    ValueError: there are not as many as parameters.
  """
  if shardings is None:
    types = [jax.typeof(leaf.mu.codes).sharding for leaf in resting]
    return [t if t.mesh.explicit_axes else None for t in types]
  found = jax.tree.leaves(shardings)
  if wrong := [x for x in found if not isinstance(x, NamedSharding)]:
    raise TypeError(
      f"{op}: shardings must be NamedShardings, got {wrong[0]!r}; pass "
      "jax.tree.map(lambda x: x.sharding, params)"
    )
  if len(found) != len(resting):
    raise ValueError(
      f"{op}: there must be a sharding for each parameter, got {len(found)} "
      f"for {len(resting)}; pass those of the parameters that this "
      "transformation sees"
    )
  return found


def run_on_shards(
  step: Callable[..., tuple[Array, Moments]],
  sharding: NamedSharding | None,
  arrays: tuple[Array, ...],
  resting: Moments,
  *scalars: Any,
  groups: Groups,
  **kwargs: Any,
) -> tuple[Array, Moments]:
  """`step(*arrays, resting, *scalars, groups=groups, ...)`, part by part.

  Args:
    step: `adam.adam_update` or `adam.adamw_step`.
    sharding: of the leaf. None, or groups that lie across devices, leave the
      step to XLA.
    arrays: of the leaf's shape.
    resting: the leaf's moments.
    *scalars: the same for all devices.
    groups: the leaf's group codecs.
    **kwargs: static, for `step`.

  Returns:
    What `step` does.
  """
  if sharding is None or not _has_whole_groups(sharding, arrays[0], groups):
    return step(*arrays, resting, *scalars, groups=groups, **kwargs)
  whole, spec = arrays[0].shape, sharding.spec
  of_resting = jax.tree.map(lambda x: spec if x.ndim else P(), resting)

  def local(arrays, resting, scalars):
    return step(
      *arrays,
      resting,
      *scalars,
      groups=groups,
      start=_start(spec, arrays[0].shape),
      whole=whole,
      **kwargs,
    )

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.explicit_axes:
    arrays = tuple(jax.sharding.reshard(x, spec) for x in arrays)
    resting = jax.tree.map(jax.sharding.reshard, resting, of_resting)
  return jax.shard_map(
    local,
    mesh=sharding.mesh if mesh.empty else None,
    in_specs=(spec, of_resting, P()),
    out_specs=(spec, of_resting),
    check_vma=False,
  )(arrays, resting, scalars)


def _has_whole_groups(sharding, x, groups: Groups) -> bool:
  if not x.ndim:
    return True
  share = sharding.shard_shape(x.shape)[-1]
  sizes = [getattr(group, "group_size", 1) for group in groups]
  return share == x.shape[-1] or all(share % size == 0 for size in sizes)


def _start(spec: P, shape: tuple[int, ...]) -> Array:
  """Where the device's part starts along each axis: uint32 [ndim]."""
  axes = (*spec, *(None,) * (len(shape) - len(spec)))
  starts = [
    0 if names is None else jax.lax.axis_index(names) * size
    for names, size in zip(axes, shape, strict=True)
  ]
  return jnp.asarray(starts, jnp.uint32).reshape(len(shape))
