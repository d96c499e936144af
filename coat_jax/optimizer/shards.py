# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step on each device's shard of a leaf.

XLA partitions a step in plain JAX by itself, but no kernel. Where a leaf's
sharding is known, the step runs inside `jax.shard_map`: nothing moves between
devices, and a device draws the random words of its own rows and columns of the
whole leaf, so that the result does not depend on the mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, P
from jax.sharding import NamedSharding

from coat_jax.optimizer.moments import GroupCodecs, Stored


def shardings_of(
  op: str, shardings: Any, leaves: Sequence[Stored]
) -> list[NamedSharding | None]:
  """The sharding of each leaf, or None where it is not known.

  Args:
    op: the public function that asks, for error messages.
    shardings: tree of `NamedSharding`s or None.
    leaves: stored moments of the leaves; on explicit axes the shardings are
      part of their types.

  Raises:
    TypeError: a leaf of `shardings` is not a `NamedSharding`.
    ValueError: there are not as many as parameters.
  """
  if shardings is None:
    types = [jax.typeof(stored[0].codes).sharding for stored in leaves]
    return [t if t.mesh.explicit_axes else None for t in types]
  found = jax.tree.leaves(shardings)
  if wrong := [x for x in found if not isinstance(x, NamedSharding)]:
    raise TypeError(
      f"{op}: shardings must be NamedShardings, got {wrong[0]!r}; pass "
      "jax.tree.map(lambda x: x.sharding, params)"
    )
  if len(found) != len(leaves):
    raise ValueError(
      f"{op}: there must be a sharding for each parameter, got {len(found)} "
      f"for {len(leaves)}; pass those of the parameters that this "
      "transformation sees"
    )
  return found


def run_on_shards(
  step: Callable[..., tuple[Any, Stored]],
  sharding: NamedSharding | None,
  arrays: tuple[Any, ...],
  stored: Stored,
  *scalars: Any,
  groups: GroupCodecs,
  layer: Array | None = None,
  **kwargs: Any,
) -> tuple[Any, Stored]:
  """`step(*arrays, stored, *scalars, groups=groups, ...)`, shard by shard.

  Args:
    step: such as `adam.adam_update` or `lion.lion_step`.
    sharding: of the leaf. None, or groups that are split over devices, leave
      the step to XLA.
    arrays: of the leaf's shape, or trees of such; with `layer`, all but the
      first [1, ...].
    stored: the leaf's moments.
    *scalars: the same for all devices.
    groups: the leaf's group codecs.
    layer: which layer of a stacked leaf is stepped, or None for the leaf.
    **kwargs: static, for `step`.

  Returns:
    What `step` returns.

  Raises:
    ValueError: the axis of `layer` is sharded.
  """
  whole = jax.tree.leaves(arrays)[0].shape
  # Where it is not needed, `step` need not know of layers.
  further = {} if layer is None else dict(layer=layer)
  if sharding is None or not _has_whole_groups(sharding, whole, groups):
    return step(*arrays, stored, *scalars, groups=groups, **further, **kwargs)
  spec = sharding.spec
  if layer is not None and spec[:1] not in ((), (None,)):
    raise ValueError(
      "step_in_backward: stacked parameters must be whole along their axis of "
      f"layers on each device, got {spec}; shard other axes"
    )
  of_stored = jax.tree.map(lambda x: spec if x.ndim else P(), stored)

  def local(arrays, stored, scalars, further):
    return step(
      *arrays,
      stored,
      *scalars,
      groups=groups,
      start=_start(spec, jax.tree.leaves(arrays)[0].shape),
      whole=whole,
      **further,
      **kwargs,
    )

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.explicit_axes:
    arrays = jax.tree.map(lambda x: jax.sharding.reshard(x, spec), arrays)
    stored = jax.tree.map(jax.sharding.reshard, stored, of_stored)
  return jax.shard_map(
    local,
    mesh=sharding.mesh if mesh.empty else None,
    in_specs=(spec, of_stored, P(), P()),
    out_specs=(spec, of_stored),
    check_vma=False,
  )(arrays, stored, scalars, further)


def _has_whole_groups(sharding, shape, groups: GroupCodecs) -> bool:
  if not shape:
    return True
  share = sharding.shard_shape(shape)[-1]
  sizes = [getattr(group, "group_size", 1) for group in groups]
  return share == shape[-1] or all(share % size == 0 for size in sizes)


def _start(spec: P, shape: tuple[int, ...]) -> Array:
  """Where the device's shard starts along each axis: uint32 [ndim]."""
  axes = (*spec, *(None,) * (len(shape) - len(spec)))
  starts = [
    0 if names is None else jax.lax.axis_index(names) * size
    for names, size in zip(axes, shape, strict=True)
  ]
  return jnp.asarray(starts, jnp.uint32).reshape(len(shape))
