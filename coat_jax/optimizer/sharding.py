# SPDX-License-Identifier: Apache-2.0
"""Computes how an optimizer's FP8 state is sharded: like its parameters.

We trace `init` on a mesh of explicit axes, where types contain shardings. This
works no matter what wraps the optimizer, and the shardings are valid for
automatic axes too.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from coat_jax.codecs import MomentCodec
from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics.checks import check_function, refuse
from coat_jax.optimizer import arguments, boxes
from coat_jax.optimizer.masks import QuantizeMask, in_order, leaf_paths
from coat_jax.optimizer.shards import check_spec, splits_groups
from coat_jax.optimizer.state import moments_in

_SMALLEST_GROUP = 16


def abstract_state(
  init: Callable[[Any], Any], params: Any, shardings: Any = None
) -> Any:
  """Returns shapes, dtypes and shardings of the state, without allocating it.

  An array is sharded like the parameter that it is computed from: codes and
  other arrays of the parameter's shape have its sharding, and statistics are
  sharded along the same axes. An array that is computed from no parameter is
  replicated. If parameters are in flax boxes, call this function under the same
  mesh as `init`, because the boxes around statistics depend on that mesh.

  Args:
    init: `optimizer.init` of any optax transformation, or another function of
      the parameters, such as one that makes a whole train state.
    params: tree of arrays or `jax.ShapeDtypeStruct`s.
    shardings: `NamedSharding`s on one mesh, a tree with one leaf per parameter;
      None to use the shardings of `params`.

  Returns:
    The result of `jax.eval_shape(init, params)`, with a `NamedSharding` in each
    `jax.ShapeDtypeStruct`. Orbax can restore into it.

  Raises:
    TypeError: a sharding, a leaf of `params` or `init` has the wrong type.
    ValueError: `shardings` do not fit `params`, or devices would split a group
      (in an `nnx.State`, groups are not checked).

  Examples:
    >>> import jax, optax
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import abstract_state
    >>> mesh = jax.make_mesh((1, 1), ("data", "fsdp"))
    >>> params = {"kernel": jax.ShapeDtypeStruct((64, 1024), "float32")}
    >>> where = {"kernel": jax.NamedSharding(mesh, jax.P(None, "fsdp"))}
    >>> optimizer = optax.chain(optax.clip(1.0), coat_adamw(1e-3))
    >>> state = abstract_state(optimizer.init, params, where)[1][0]
    >>> amax = state.mu.amax["kernel"]
    >>> print(amax.shape, amax.sharding.spec[1], state.count.sharding.spec)
    (64, 8) fsdp P()
  """
  return _abstract_state("abstract_state", init, params, shardings)


def state_shardings(
  init: Callable[[Any], Any], params: Any, shardings: Any = None
) -> Any:
  """Returns the shardings of the result of `init`: a tree of `NamedSharding`s.

  Pass them to `jax.jit` (in_shardings, out_shardings) or `jax.device_put`.

  Args:
    init, params, shardings: as for `abstract_state`.

  Returns:
    A tree with the structure of `init(params)`.

  Raises:
    TypeError, ValueError: the same as for `abstract_state`.
  """
  state = _abstract_state("state_shardings", init, params, shardings)
  return jax.tree.map(lambda x: x.sharding, state)


def fit_group_size(
  codec: MomentCodec,
  params: Any,
  shardings: Any = None,
  *,
  quantize_mask: QuantizeMask | None = None,
) -> MomentCodec:
  """Returns the codec with the largest groups that devices do not split.

  Codes depend on the group size: a state can be restored on any mesh, but only
  by an optimizer with the same group size.

  Args:
    codec: a codec with the largest group size that you allow.
    params, shardings: as for `abstract_state`.
    quantize_mask: as for `coat_adamw`; selects the leaves that are encoded.

  Returns:
    `codec`, possibly with a smaller group size: one that divides each device's
    shard of the last axis, for every encoded leaf whose last axis is sharded.

  Raises:
    TypeError: the same as for `abstract_state` and `coat_adamw`.
    ValueError: `shardings` do not fit `params`, or only groups of fewer than 16
      values would fit (their statistics would need too much memory: `coat`
      stores 5 bytes per group).
  """
  op = "fit_group_size"
  arguments.check_codec(op, codec)
  placed, _ = _placed(op, params, shardings)
  leaves = leaf_paths(placed)
  chosen = arguments.choose_leaves(op, placed, quantize_mask)
  shares = {
    path: share
    for (path, leaf), is_encoded in zip(leaves, chosen, strict=True)
    if is_encoded and (share := _share(leaf)) < leaf.shape[-1]
  }
  # If no last axis is sharded, `common` is 0, which every group size divides.
  common = math.gcd(*shares.values())

  def fit(group: GroupCodec) -> GroupCodec:
    most = getattr(group, "group_size", None)
    if most is None:
      return group
    size = next(n for n in range(most, 0, -1) if common % n == 0)
    if size < min(_SMALLEST_GROUP, most):
      raise ValueError(
        f"{op}: groups must have at least {_SMALLEST_GROUP} values, got "
        f"{size}, the largest size that divides each device's part of the last "
        f"axis (values by leaf: {shares}); shard other axes of these leaves, "
        "or leave some out with quantize_mask"
      )
    return dataclasses.replace(group, group_size=size)  # pyright: ignore[reportArgumentType, reportCallIssue]

  return dataclasses.replace(codec, mu=fit(codec.mu), nu=fit(codec.nu))


def _abstract_state(op, init, params, shardings) -> Any:
  check_function(op, "init", init, "pass optimizer.init")
  placed, mesh = _placed(op, params, shardings)
  explicit = mesh.abstract_mesh.update_axis_types(
    dict.fromkeys(mesh.axis_names, AxisType.Explicit)
  )

  def on(mesh, x):
    spec = x.sharding.spec if x.sharding else jax.P()
    if AxisType.Explicit not in mesh.axis_types:
      # Write the spec as jit writes the shardings of its results; otherwise the
      # second step would see different shardings and compile again.
      spec = tuple(spec)
      while spec and spec[-1] is None:
        spec = spec[:-1]
    return x.update(sharding=NamedSharding(mesh, jax.P(*spec)))

  callers_mesh = boxes.callers_mesh(jax.sharding.get_abstract_mesh())
  with callers_mesh, jax.sharding.use_abstract_mesh(explicit):
    state = jax.eval_shape(
      init, jax.tree.map(lambda x: on(explicit, x), placed)
    )
  state = jax.tree.map(lambda x: on(mesh, x), state)
  # An `nnx.State` contains no codecs, so we cannot check its groups.
  for moment in moments_in(state):
    leaves = zip(leaf_paths(moment.codes), moment.leaves(), strict=True)
    for (path, codes), encoded in leaves:
      _check_groups(op, path, codes, moment.codec_of(encoded))
  return state


def _placed(
  op: str, params: Any, shardings: Any
) -> tuple[Any, Mesh | AbstractMesh]:
  """Returns abstract parameters with their shardings, and the mesh."""
  leaves = leaf_paths(params)
  for path, leaf in leaves:
    if not hasattr(leaf, "shape"):
      refuse(TypeError, op, "params", "a tree of arrays", leaf, f"see {path!r}")
  where: list[Any] = [getattr(leaf, "sharding", None) for _, leaf in leaves]
  if shardings is not None:
    named = leaf_paths(shardings)
    paths, got = ([path for path, _ in each] for each in (leaves, named))
    if sorted(got) != sorted(paths):
      raise ValueError(
        f"{op}: there must be a sharding for each parameter, got none for "
        f"{[x for x in paths if x not in got]}, and unused ones for "
        f"{[x for x in got if x not in paths]}; pass trees of one structure"
      )
    where = in_order(paths, named)
  if not leaves:
    raise ValueError(
      f"{op}: there must be at least one parameter, got {params}; pass the "
      "parameters that the optimizer updates"
    )
  out = []
  for (path, leaf), sharding in zip(leaves, where, strict=True):
    if not isinstance(sharding, NamedSharding):
      raise TypeError(
        f"{op}: parameters must have NamedShardings, got {sharding} at "
        f"{path!r}; pass as shardings "
        "jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)"
      )
    if sharding.mesh != where[0].mesh:
      raise ValueError(
        f"{op}: shardings must be on one mesh, got {sharding.mesh} at {path!r} "
        f"and {where[0].mesh} at {leaves[0][0]!r}; use one mesh for all"
      )
    check_spec(op, path, leaf.shape, sharding)
    out.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
  return jax.tree.structure(params).unflatten(out), where[0].mesh


def _check_groups(op, path: str, codes: Any, codec: GroupCodec) -> None:
  """Raises a ValueError if devices would split a group of a leaf's codes."""
  if not splits_groups(codes.sharding, codes.shape, codec):
    return
  share, size = _share(codes), getattr(codec, "group_size", 1)
  fitting = [str(fit) for fit in range(size, 0, -1) if share % fit == 0]
  raise ValueError(
    f"{op}: each device must hold whole groups of {size} values, got {share} "
    f"values per device: the last axis of {path!r} ({codes.shape[-1]} values) "
    f"is sharded over {codes.shape[-1] // share} devices; use a codec whose "
    f"group size is one of {', '.join(fitting[:5])} (fit_group_size finds one "
    "for all leaves), or shard other axes"
  )


def _share(x: Any) -> int:
  """Returns how many values of each row a device stores."""
  return x.sharding.shard_shape(x.shape)[-1] if x.ndim else 1
