# SPDX-License-Identifier: Apache-2.0
"""Steps one leaf with encoded moments, or all leaves of a tree.

An optimizer passes its arithmetic, `adam.adam` or `lion.lion`, which computes
an update and new moments in f32. This file decodes the moments before that and
encodes them afterwards.

XLA partitions a step that is plain JAX by itself, but it cannot partition a
kernel. If a leaf's sharding is known, the step runs on each device's shard:
nothing moves between devices, and a device draws the random words that belong
to its rows and columns of the whole leaf, so the result does not depend on the
mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, P, lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from coat_jax import mesh
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import weights
from coat_jax.optimizer.arguments import check_gradients
from coat_jax.optimizer.masks import leaf_paths
from coat_jax.optimizer.state import (
  GroupCodecs,
  Moment,
  MomentState,
  Stored,
  decode,
  encode,
  in_f32,
  next_state,
  stored_leaves,
)
from coat_jax.optimizer.weights import Weight

# `arithmetic(g, *moments, scalars)`: the update and the new moments, all f32.
Arithmetic = Callable[..., tuple[Array, ...]]


class StepScalars(NamedTuple):
  """Scalars that a whole step needs besides those of its arithmetic, f32 [].

  Attributes:
    learning_rate: a positive rate descends.
    weight_decay: zero for a leaf that does not decay.
    grad_scale: factor of the gradient, or None.
  """

  learning_rate: Array
  weight_decay: Array
  grad_scale: Array | None


def one_body(fn: Callable) -> Callable:
  """Compiles `fn` once for all leaves of a shape, if `shares_body()`.

  XLA optimizes a body that it inlines late only once, and leaves share its
  temporary memory. Compiling AdamW for 196 leaves on a CPU took 55 s when each
  leaf had its own body, and takes 8 s now.
  """
  jitted = functools.partial(
    jax.jit, fn, static_argnames=("arithmetic", "groups")
  )
  early = jitted(inline=True)
  if not hasattr(jax, "Inline"):  # It came with jax 0.11.
    return early
  late = jitted(inline=jax.Inline.XLA_LATE)

  @functools.wraps(fn)
  def call(*args, **kwargs):
    return (late if shares_body() else early)(*args, **kwargs)

  return call


def shares_body() -> bool:
  """Returns True on a CPU if XLA has nothing to partition.

  XLA's partitioner does not look into a body that is inlined late, and would
  gather sharded leaves first. On an H200 sharing does not pay: compiling 24
  such leaves takes as long (49 s, and 44 s apart), and temporary memory grows
  from 1.0 to 1.8 GB.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device  # None unless arrays are on a mesh.
  platform = device.platform if device else jax.default_backend()
  if platform != "cpu":
    return False
  if mesh.empty:
    return jax.device_count() == 1
  return set(mesh.manual_axes) == set(mesh.axis_names)


@one_body
def update_of(
  arithmetic: Arithmetic,
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: Any,
  groups: GroupCodecs,
) -> tuple[Array, Stored]:
  """Returns a leaf's update in the gradient's dtype, and its new moments."""
  update, *new = arithmetic(in_f32(g), *decode(groups, stored), scalars)
  return update.astype(g.dtype), encode(groups, tuple(new), part)


def step_of(
  arithmetic: Arithmetic,
  p: Weight,
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: tuple[Any, StepScalars],
  groups: GroupCodecs,
) -> tuple[Weight, Stored]:
  """Returns the new parameter and moments of one leaf, or of one layer of it.

  `p` and `g` are [..., n] (`g` is [1, ...] if one layer of a stacked leaf is
  stepped), and `scalars` are those of the arithmetic and of this step.
  Everything is computed in f32. The new parameter is stored as `p` is: rounded
  to nearest, or stochastically to bf16 and to a `SplitWeight`'s 24 bits.
  """
  layer = part.layer
  if layer is None:
    return _step(arithmetic, p, g, stored, part, scalars, groups)
  whole = jax.tree.leaves(p)[0].shape if part.whole is None else part.whole
  first = jnp.zeros(g.ndim, jnp.uint32).at[0].set(layer.astype(jnp.uint32))
  start = first if part.start is None else part.start + first
  own = LeafPart(part.key, start, whole)
  p_part, stored_part = take_layer((p, stored), layer)
  new = _step(arithmetic, p_part, g, stored_part, own, scalars, groups)
  return put_layer((p, stored), new, layer)


@one_body
def _step(arithmetic, p, g, stored, part, scalars, groups):
  """Steps all of what is passed, as in `step_of`."""
  scalars, step = scalars
  gradient = in_f32(g)
  if step.grad_scale is not None:
    gradient = gradient * step.grad_scale
  update, *values = arithmetic(gradient, *decode(groups, stored), scalars)
  new = weights.in_f32(p)
  new = new + -step.learning_rate * (update + step.weight_decay * new)
  return weights.round_like(p, new, part), encode(groups, tuple(values), part)


def step_on_shards(
  step: functools.partial,
  sharding: NamedSharding | None,
  arrays: tuple[Any, ...],
  stored: Stored,
  part: LeafPart,
  *scalars: Any,
) -> tuple[Any, Stored]:
  """Runs `step(*arrays, stored, part, *scalars)` on each device's shard.

  `step` is a partial of `adam.adam_update`, `adam.adamw_step` or
  `lion.lion_step` with `groups`. `arrays` are arrays of the leaf's shape or
  trees of them; if one layer is stepped, all but the first are [1, ...]. If
  `sharding` is None, or devices would split groups, XLA partitions the step.
  Raises a ValueError if the axis of layers is sharded.
  """
  whole = jax.tree.leaves(arrays)[0].shape
  spec = P() if sharding is None else sharding.spec
  groups = step.keywords["groups"]
  if sharding is None or not _has_whole_groups(sharding, whole, groups):
    return mesh.run_whole(step, *arrays, stored, part, *scalars, out_specs=spec)
  if part.layer is not None and spec[:1] not in ((), (None,)):
    raise ValueError(
      "step_in_backward: stacked parameters must be whole along their axis of "
      f"layers on each device, got {spec}; shard other axes"
    )
  of_stored = jax.tree.map(lambda x: spec if x.ndim else P(), stored)

  def local(arrays, stored, part, scalars):
    start = _start(spec, jax.tree.leaves(arrays)[0].shape)
    part = dataclasses.replace(part, start=start, whole=whole)
    return step(*arrays, stored, part, *scalars)

  return mesh.run_on_shards(
    local,
    arrays,
    stored,
    part,
    scalars,
    in_specs=(spec, of_stored, P(), P()),
    out_specs=(spec, of_stored),
    mesh=sharding.mesh,
  )


def update_leaves(
  op: str,
  update_leaf: Callable[..., tuple[Array, Stored]],
  updates: optax.Updates,
  state: MomentState,
  scalars: Any,
  *,
  seed: ArrayLike,
  shardings: Any,
  **kwargs: Any,
) -> tuple[optax.Updates, MomentState]:
  """Returns the tree of updates and the next state.

  `update_leaf(g, stored, part, scalars, *, groups, **kwargs)` returns one
  leaf's update and new moments. It runs on each device's shard if the shardings
  are known.
  """
  count = optax.safe_increment(state.count)
  new_updates, new_stored = [], []
  grads = gradients_like(op, updates, state)
  leaves = stored_leaves(state)
  where = shardings_of(op, shardings, state.mu)
  for i, (g, (stored, groups)) in enumerate(zip(grads, leaves, strict=True)):
    update, stored = step_on_shards(
      functools.partial(update_leaf, groups=groups, **kwargs),
      where[i],
      (g,),
      stored,
      LeafPart(stochastic.leaf_key(seed, count, i)),
      scalars,
    )
    new_updates.append(update)
    new_stored.append(stored)
  new_updates = jax.tree.structure(updates).unflatten(new_updates)
  return new_updates, next_state(state, count, new_stored)


def promoted(op: str, updates: optax.Updates, params: optax.Params | None):
  """Casts gradients to the dtypes that their updates have in optax.

  Raises a ValueError if gradients and parameters have different structures.
  """
  if params is None:
    return updates
  grads, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
  try:
    leaves = treedef.flatten_up_to(params)
  except ValueError as error:
    raise ValueError(
      f"{op}: gradients must have the structure of the parameters, got "
      f"{jax.tree.structure(updates)} for {jax.tree.structure(params)}; pass "
      "the gradients of these parameters"
    ) from error
  return treedef.unflatten(
    None if g is None else g.astype(jnp.result_type(g, p))
    for g, p in zip(grads, leaves, strict=True)
  )


def gradients_like(
  op: str, updates: optax.Updates, state: MomentState
) -> list[Array]:
  """Lists the gradients in the order of a state's leaves.

  Raises a TypeError for gradients that are neither floating nor complex, and a
  ValueError if the state is for other parameters.
  """
  grads = leaf_paths(updates)
  check_gradients(op, grads)
  shapes = [x.shape for x in jax.tree.leaves(state.mu.codes)]
  wrong = [
    f"{g.shape} for {shape} at {path!r}"
    for (path, g), shape in zip(grads, shapes, strict=False)
    if g.shape != shape
  ]
  if len(grads) != len(shapes):
    wrong = [f"{len(grads)} leaves for {len(shapes)}"]
  if wrong:
    raise ValueError(
      f"{op}: gradients must have the shapes of the parameters given to init, "
      f"got {wrong[0]}; initialize the state with these parameters"
    )
  return [g for _, g in grads]


def shardings_of(
  op: str, shardings: Any, moment: Moment
) -> list[NamedSharding | None]:
  """Lists each leaf's sharding, or None if it is unknown.

  On explicit axes the shardings are read from the types of the moment's codes.
  Raises if `shardings` is not a tree of one `NamedSharding` per parameter.
  """
  codes = jax.tree.leaves(moment.codes)
  if shardings is None:
    types = [jax.typeof(x).sharding for x in codes]
    return [t if t.mesh.explicit_axes else None for t in types]
  found = jax.tree.leaves(shardings)
  if wrong := [x for x in found if not isinstance(x, NamedSharding)]:
    raise TypeError(
      f"{op}: shardings must be NamedShardings, got {wrong[0]!r}; pass "
      "jax.tree.map(lambda x: x.sharding, params)"
    )
  if len(found) != len(codes):
    raise ValueError(
      f"{op}: there must be a sharding for each parameter, got {len(found)} "
      f"for {len(codes)}; pass those of the parameters that this "
      "transformation sees"
    )
  return found


def _has_whole_groups(sharding, shape, groups: GroupCodecs) -> bool:
  if not shape:
    return True
  share = sharding.shard_shape(shape)[-1]
  sizes = [getattr(group, "group_size", 1) for group in groups]
  return share == shape[-1] or all(share % size == 0 for size in sizes)


def _start(spec: P, shape: tuple[int, ...]) -> Array:
  """Returns where the device's shard starts along each axis: uint32 [ndim]."""
  axes = (*spec, *(None,) * (len(shape) - len(spec)))
  starts = [
    0 if names is None else jax.lax.axis_index(names) * size
    for names, size in zip(axes, shape, strict=True)
  ]
  return jnp.asarray(starts, jnp.uint32).reshape(len(shape))


class LeafSteps(NamedTuple):
  """One step of an optimizer that is taken leaf by leaf.

  Attributes:
    weights: the parameters' leaves in the order of the tree; each an array, or
      a tree of arrays of one shape.
    stored: what the optimizer keeps for each leaf, a tree of scalars and of
      arrays whose leading axes are the leaf's.
    step: `step(i, weight, gradient, stored, *, layer=None, grad_scale=None)`
      returns leaf i's new weight and what is kept for it. With `layer`, int32
      [], both hold all stacked layers, only this layer is stepped, and its
      gradient is [1, ...].
    end: `end(weights, stored)` returns the new parameters and the new state.
  """

  weights: Sequence[Any]
  stored: Sequence[Any]
  step: Callable[..., tuple[Any, Any]]
  end: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]


def take_layer(stacked: Any, layer: Array) -> Any:
  """Takes one layer, [1, ...], of each array of a tree; keeps scalars."""
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, layer, 1) if x.ndim else x, stacked
  )


def put_layer(stacked: Any, new: Any, layer: Array) -> Any:
  """Inverts `take_layer`: returns `stacked` with one layer replaced."""

  def put(x, y):
    return lax.dynamic_update_slice_in_dim(x, y, layer, 0) if x.ndim else x

  return jax.tree.map(put, stacked, new)
