# SPDX-License-Identifier: Apache-2.0
"""Runs an optimizer's step: decodes moments, updates them in f32, encodes them.

XLA cannot partition a kernel. So if a leaf's sharding is known and splits no
group, each device updates its own shard, without communication. Random words
depend on a value's index in the whole leaf, so no result depends on the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, P, lax
from jax.typing import ArrayLike

from coat_jax import mesh
from coat_jax.codecs.factored import Factored
from coat_jax.codecs.group import Encoded, GroupCodec
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import arguments, passes, weights
from coat_jax.optimizer.shards import check_mesh, shardings_of, splits_groups
from coat_jax.optimizer.state import (
  GroupCodecs,
  MomentOptions,
  Stored,
  check_state,
  stored_leaves,
)
from coat_jax.optimizer.weights import Weight, in_f32

# `arithmetic(g, *moments, scalars)` returns the update and new moments, in f32.
Arithmetic = Callable[..., tuple[Array, ...]]


class StepScalars(NamedTuple):
  """The scalars of a step that its `Arithmetic` does not use, each f32 []."""

  learning_rate: Array
  weight_decay: Array
  grad_scale: Array | None  # Multiplies the gradient.


@functools.partial(jax.jit, static_argnames=("groups", "first"), inline=True)
def encode(
  groups: GroupCodecs,
  values: tuple[Array, ...],
  part: LeafPart,
  first: int = 0,
) -> Stored:
  """Encodes moments of one leaf, beginning with its moment number `first`."""

  def f(values, part):
    shape = values[0].shape
    return tuple(
      group.encode(x, noise_of(group, first + j, part, shape))
      for j, (group, x) in enumerate(zip(groups, values, strict=True))
    )

  # `run_whole` avoids explicit axes, on which JAX would raise an error for
  # reshaping sharded rows, and would draw all random words on each device.
  return mesh.run_whole(f, values, part, out_specs=mesh.spec_of(values[0]))


def noise_of(
  group: GroupCodec, place: int, part: LeafPart, shape: tuple[int, ...]
) -> Array | None:
  """Returns the noise that rounds moment number `place` of a leaf, or None."""
  if not group.needs_noise:
    return None
  own = dataclasses.replace(part, key=pair_key(part.key, place // 2))
  words = stochastic.next_words(own.words(shape), place % 2)
  return stochastic.uniform(words)


@functools.partial(jax.jit, static_argnames="groups", inline=True)
def decode(groups: GroupCodecs, stored: Stored) -> tuple[Array, ...]:
  """Decodes the moments of one leaf to f32."""

  def f(stored):
    return tuple(
      group.decode(encoded)
      for group, encoded in zip(groups, stored, strict=True)
    )

  return mesh.run_whole(f, stored, out_specs=_spec_of(stored[0]))


def _spec_of(encoded: Encoded) -> P:
  """Returns the spec of the leaf that was encoded."""
  if encoded.codes.ndim:
    return mesh.spec_of(encoded.codes)
  # A factored moment has no codes. Its means are sharded like the leaf, except
  # along axes that devices cannot split.
  specs = map(mesh.spec_of, (encoded.amax, encoded.range))
  return P(*(row or column for row, column in zip(*specs, strict=True)))


def pair_key(key: Array, pair: int) -> Array:
  """Returns the key of a pair of moments; pair 0 uses the leaf's own key."""
  if not pair:
    return key
  return stochastic.mix(key ^ jnp.uint32(pair * stochastic.GOLDEN % 2**32))


def one_body(fn: Callable) -> Callable:
  """Compiles `fn` once for all leaves of one shape, if `shares_body()`.

  This needs jax 0.11. XLA inlines `fn` late, so it optimizes only one copy: on
  a CPU, the update of 196 leaves compiles in 9 s instead of 55 s.
  """
  jitted = functools.partial(
    jax.jit, fn, static_argnames=("arithmetic", "groups")
  )
  early = jitted(inline=True)
  if not hasattr(jax, "Inline"):
    return early
  late = jitted(inline=jax.Inline.XLA_LATE)

  @functools.wraps(fn)
  def call(*args, **kwargs):
    return (late if shares_body() else early)(*args, **kwargs)

  return call


def shares_body() -> bool:
  """Returns whether leaves of one shape share one compiled function body.

  They do only on a CPU, and only if XLA partitions nothing: XLA's partitioner
  does not look into a body that is inlined late. On an H200, sharing the body
  takes more compile time and temporary memory.
  """
  if platform() != "cpu":
    return False
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return jax.device_count() == 1
  return set(mesh.manual_axes) == set(mesh.axis_names)


def platform() -> str:
  """Returns the platform for which the current trace is probably compiled."""
  # Without a mesh, the abstract device is None.
  device = jax.sharding.get_abstract_mesh().abstract_device
  return getattr(device, "platform", jax.default_backend())


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

  def compute(g, *moments):
    return arithmetic(in_f32(g), *moments, scalars)

  def finish(update, split):
    del split
    return update.astype(g.dtype)

  return _computed(compute, finish, g, stored, part, groups)


def step_of(
  arithmetic: Arithmetic,
  p: Weight,
  g: Array,
  stored: Stored,
  part: LeafPart,
  scalars: tuple[Any, StepScalars],
  groups: GroupCodecs,
) -> tuple[Weight, Stored]:
  """Returns the new parameter and moments of one leaf.

  If `part.layer` is not None, only this layer of a stacked leaf is updated, and
  `g` is [1, ...].
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
  """Updates a whole leaf, or one layer that was taken out of it."""
  scalars, step = scalars

  def compute(arrays, *moments):
    p, gradient = map(in_f32, arrays)
    if step.grad_scale is not None:
      gradient = gradient * step.grad_scale
    update, *values = arithmetic(gradient, *moments, scalars)
    return p + -step.learning_rate * (update + step.weight_decay * p), *values

  def finish(x, split):
    return weights.round_like(p, x, part, split)

  return _computed(compute, finish, (p, g), stored, part, groups)


def is_factored(groups: GroupCodecs) -> bool:
  """Returns whether a leaf's second moment is factored."""
  return groups[1:] == (Factored(),)


def _computed(compute, finish, arrays, stored, part, groups):
  """Runs `compute`, passes its result to `finish`, and encodes the moments.

  A factored second moment is only read: the optimizer has already updated it.
  """
  shape = stored[0].codes.shape
  on_gpu = platform() in ("gpu", "cuda", "rocm")
  explicit = jax.sharding.get_abstract_mesh().explicit_axes
  # A factored moment has no groups.
  run, grouped, kept = passes.run, groups, ()
  if is_factored(groups):
    run, grouped, kept = passes.run_factored, groups[:1], stored[1:]
  if on_gpu and not explicit and passes.can_run(groups, shape):
    noise = [noise_of(x, i, part, shape) for i, x in enumerate(grouped)]
    finished, new = run(groups, compute, finish, arrays, stored, noise)
  else:
    result, *values = compute(arrays, *decode(groups, stored))
    finished = finish(result, lambda x: x)
    new = encode(grouped, tuple(values[: len(grouped)]), part)
  return finished, (*new, *kept)


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


class Leaves:
  """The leaves of an optimizer state during step `count`."""

  def __init__(self, options: MomentOptions, state: Any):
    check_state(options.op, state, options.state_type, options.codec)
    self.count = optax.safe_increment(state.count)
    leaves = stored_leaves(state)
    self.stored = [stored for stored, _ in leaves]
    self._codecs = [groups for _, groups in leaves]
    self._shardings = shardings_of(options, state.mu)
    self._op, self._seed, self._state = options.op, options.seed, state

  def step(
    self,
    i: int,
    run: Callable[..., Any],
    arrays: tuple[Any, ...],
    stored: Stored,
    scalars: tuple[Any, ...],
    layer: Array | None = None,
  ) -> tuple[Any, Stored]:
    """Returns `run(*arrays, stored, part, *scalars, groups=...)` for leaf i.

    With `layer`, all `arrays` but the first contain only this layer, [1, ...].
    XLA partitions the step if the sharding is unknown or splits groups.
    """
    groups, sharding = self._codecs[i], self._shardings[i]
    run = functools.partial(run, groups=groups)
    part = LeafPart(stochastic.leaf_key(self._seed, self.count, i), layer=layer)
    whole = jax.tree.leaves(arrays)[0].shape
    if layer is not None and any(
      x.ndim and x.shape[0] != whole[0] for x in jax.tree.leaves(stored)
    ):
      raise ValueError(
        "step_in_backward: layers must not share second moments, got a stacked "
        f"leaf {list(whole)} whose means all layers share; leave it out with "
        "quantize_mask"
      )
    spec = P() if sharding is None else sharding.spec
    where = None if sharding is None else sharding.mesh
    if where is not None:
      check_mesh(self._op, (arrays, stored), where)
    if sharding is None or any(
      splits_groups(sharding, whole, group) for group in groups
    ):
      args = *arrays, stored, part, *scalars
      return mesh.run_whole(run, *args, out_specs=spec, mesh=where)
    if layer is not None and spec[:1] not in ((), (None,)):
      raise ValueError(
        "step_in_backward: stacked parameters must not be sharded along their "
        f"axis of layers, got {spec}; shard other axes"
      )
    of_stored = jax.tree.map(lambda x: spec if x.ndim else P(), stored)

    def local(arrays, stored, part, scalars):
      start = _start(spec, jax.tree.leaves(arrays)[0].shape)
      part = dataclasses.replace(part, start=start, whole=whole)
      return run(*arrays, stored, part, *scalars)

    args = arrays, stored, part, scalars
    return mesh.run_on_shards(
      local,
      *args,
      in_specs=(spec, of_stored, P(), P()),
      out_specs=(spec, of_stored),
      mesh=where,
    )

  def end(self, stored: Sequence[Stored]) -> Any:
    """Returns the next state, with these moments."""
    moments = [
      old.replace([row[j] for row in stored])
      for j, old in enumerate(self._state[1:])
    ]
    return type(self._state)(self.count, *moments)


def _start(spec: P, shape: tuple[int, ...]) -> Array:
  """Returns where in the leaf this device's shard begins: uint32 [ndim]."""
  axes = (*spec, *(None,) * (len(shape) - len(spec)))
  starts = [
    0 if names is None else jax.lax.axis_index(names) * size
    for names, size in zip(axes, shape, strict=True)
  ]
  return jnp.asarray(starts, jnp.uint32).reshape(len(shape))


def transformation(
  options: MomentOptions,
  update_leaf: Callable[..., tuple[Array, Stored]],
  scalars_of: Callable[[ArrayLike], Any],
) -> optax.GradientTransformation:
  """Makes an optax transformation from the update of one leaf.

  `update_leaf(g, stored, part, scalars, groups=...)` returns an update and the
  new moments.
  """

  def update_fn(updates, state, params=None) -> Any:
    leaves = Leaves(options, state)
    scalars = (scalars_of(leaves.count),)
    updates = arguments.promoted(options.op, updates, params)
    grads = arguments.gradients_like(options.op, updates, state.mu.codes)
    new = [
      leaves.step(i, update_leaf, (g,), stored, scalars)
      for i, (g, stored) in enumerate(zip(grads, leaves.stored, strict=True))
    ]
    treedef = jax.tree.structure(updates)
    new_updates = treedef.unflatten([update for update, _ in new])
    return new_updates, leaves.end([stored for _, stored in new])

  return optax.GradientTransformation(options.init, update_fn)
