# SPDX-License-Identifier: Apache-2.0
"""Runs functions on a mesh of devices; defines shardings and collectives.

There are two ways to run a function:

  run_on_shards   each device runs it on its own shards, inside `jax.shard_map`,
                  with explicit collectives. Kernels need this: XLA cannot
                  partition them and would gather their arguments first.
  run_whole       XLA partitions the function. Explicit axes become automatic
                  inside the function. On explicit axes, the function would have
                  to state a sharding wherever JAX cannot infer one, as for a
                  sum over sharded tokens, a reshape or the carry of a scan.

Without a mesh, or inside the caller's `shard_map`, `run_on_shards` and
`run_whole` just call the function.

Blocks (MLP, MoE, attention) shard arrays over the axes of `MeshAxes` as
follows. The second column lists the mesh axes that shard each dimension. There
are B sequences of T tokens, D features between blocks, F features inside a
block, and E experts.

  [B, T, D]            batch, tensor      tokens, between blocks
  [B, T, F]            batch, -, tensor   whole sequences, inside a block
  weight [D, ..., F]   fsdp, ..., tensor  split by columns
  weight [F, D]        tensor and fsdp    split by inputs
  weight [D, ...]      fsdp               split by rows only, in drop-in layers
  weight [E, D, 2, F]  expert, fsdp, -, tensor    gate and up of experts

The collectives in this file do nothing if `axes` is None or the mesh axis has
one device.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, P, lax
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, reshard

from coat_jax.numerics.varying import varying
from coat_jax.recipes import MeshAxes

# How the tensor axis splits the weight of a linear layer: by "columns", or by
# "inputs", which are the rows of the weight and the columns of x. If None, the
# weight is not split, and devices along the axis process different tokens.
Split = Literal[None, "columns", "inputs"]


def run_on_shards(
  f: Callable,
  *args: Any,
  in_specs: Any,
  out_specs: Any,
  mesh: Mesh | AbstractMesh | None = None,
  check_vma: bool = False,
) -> Any:
  """Runs f(*args) on each device's shards, as `jax.shard_map` does.

  On explicit axes, arguments are first resharded to `in_specs`. `mesh` is used
  only if no mesh is set. Differentiating through f requires `check_vma=True`,
  which kernels do not support: they do not declare over which mesh axes their
  results vary.
  """
  if mesh is None or not jax.sharding.get_abstract_mesh().empty:
    args, mesh = place(args, in_specs), None
    if not is_split():
      return f(*args)
  return jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
  )(*args)


def run_whole(
  f: Callable,
  *args: Any,
  out_specs: Any,
  mesh: Mesh | AbstractMesh | None = None,
) -> Any:
  """Runs f(*args) and lets XLA partition it, even if mesh axes are explicit.

  On explicit axes, results are sharded by `out_specs`, except for dimensions
  that a spec cannot split evenly. A result with spec None stays on automatic
  axes; use this for values saved for a backward pass that also runs in
  `run_whole`. If no mesh is set, f runs under `mesh`.
  """
  current = jax.sharding.get_abstract_mesh()
  if mesh is not None and current.empty:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return run_whole(f, *args, out_specs=out_specs)
  args = varying(args)
  if not current.explicit_axes:
    return f(*args)

  def untyped(x):
    return reshard(x, P()) if isinstance(x, Array) else x

  def typed(x, spec):
    return x if spec is None else reshard(x, fitted(spec, x.shape))

  auto = dict.fromkeys(current.explicit_axes, AxisType.Auto)
  with jax.sharding.use_abstract_mesh(current.update_axis_types(auto)):
    out = f(*jax.tree.map(untyped, args))
  specs = jax.tree.broadcast(out_specs, out, is_leaf=lambda x: x is None)
  return jax.tree.map(typed, out, specs)


def unsplit_rows(x: Array) -> Array:
  """Keeps XLA from splitting the last axis of x, where XLA partitions."""
  if not jax.sharding.get_abstract_mesh().auto_axes:
    return x
  spec = P(*(P.UNCONSTRAINED,) * (x.ndim - 1), None)
  return with_sharding_constraint(x, spec)


def is_split() -> bool:
  """Returns whether arrays are global: on a mesh and outside `shard_map`."""
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.auto_axes or mesh.explicit_axes)


def place(arrays: Any, specs: Any) -> Any:
  """Checks that specs fit arrays; on explicit axes, reshards the arrays."""
  mesh = jax.sharding.get_abstract_mesh()
  specs = jax.tree.broadcast(specs, arrays)

  def placed(x, spec):
    names = axes_in(spec)
    if missing := [name for name in names if name not in mesh.axis_names]:
      raise ValueError(
        "layers: recipe.axes must name axes of the current mesh, got "
        f"{missing[0]!r} for {mesh.axis_names or 'no mesh'}; call layers under "
        "jax.set_mesh of a mesh with these axes, or leave recipe.axes out"
      )
    if not is_split():
      return x
    for size, entry in zip(jnp.shape(x), spec, strict=False):
      counts = {name: mesh.shape[name] for name in axes_in([entry])}
      if size % math.prod(counts.values()):
        raise ValueError(
          f"layers: an array {list(x.shape)} must be split evenly by {spec}, "
          f"got {size} for mesh axes {counts}; change the batch size, the "
          "sequence length or the mesh"
        )
    return reshard(x, spec) if mesh.explicit_axes else x

  return jax.tree.map(placed, arrays, specs)


# Specs.


def spec_of(x: Any) -> P:
  """Returns the spec in an array's type, with an entry for each dimension."""
  kind = jax.typeof(x)
  spec = kind.sharding.spec
  return P(*spec, *(None,) * (kind.ndim - len(spec)))


def axes_in(*specs: Iterable[Any]) -> tuple[str, ...]:
  """Returns the mesh axes that specs name, without duplicates."""
  found = {}
  for entry in (entry for spec in specs for entry in spec):
    names = entry if isinstance(entry, tuple) else (entry,)
    found |= dict.fromkeys(name for name in names if name is not None)
  return tuple(found)


def fitted(spec: Iterable[Any], shape: tuple[int, ...]) -> P:
  """Returns the spec, with None for entries that split `shape` unevenly."""
  sizes = jax.sharding.get_abstract_mesh().shape

  def fits(entry, size):
    return size % math.prod(sizes[name] for name in axes_in([entry])) == 0

  pairs = zip(spec, shape, strict=False)
  return P(*(entry if fits(entry, size) else None for entry, size in pairs))


def product_spec(x: Array, w: Array) -> P:
  """Returns the spec of the matmul of x [..., D] and w [D, *F].

  A mesh axis that splits both the rows of x and the columns of w splits only
  the rows of the result.
  """
  rows, columns = spec_of(x)[:-1], spec_of(w)[1:]
  taken = axes_in(rows)
  free = ([n for n in axes_in([c]) if n not in taken] for c in columns)
  return P(*rows, *(tuple(names) or None for names in free))


def tokens(axes: MeshAxes, x: Array) -> P:
  """Returns the spec of tokens between blocks, [B, T, ...] or [N, D]."""
  if x.ndim < 2:
    raise ValueError(
      "layers: on a mesh, inputs must be [..., T, D], got one token of "
      f"{x.shape[-1]} values; vmap over sequences, not over tokens"
    )
  if x.ndim < 3:
    return P(axes.tokens)
  return P(axes.batch, axes.tensor)


def own_heads(axes: MeshAxes) -> P:
  """Returns the spec of N heads, [B, T, N, H], inside a block."""
  return P(axes.batch, None, axes.tensor)


def own_columns(axes: MeshAxes, ndim: int) -> P:
  """Returns the spec of tokens inside a block, [B, T, ..., F] or [N, F]."""
  if ndim < 3:
    return P(axes.tokens)
  return P(axes.batch, *(None,) * (ndim - 2), axes.tensor)


def split_inputs(axes: MeshAxes) -> P:
  """Returns the spec of a weight [F, D] whose inputs (rows) are split."""
  return P(axes_in((axes.tensor, axes.fsdp)))


def split_kernel(axes: MeshAxes, split: Split, ndim: int) -> P:
  """Returns the spec of a linear layer's weight [D, ..., F]."""
  if split == "columns":
    return P(axes.fsdp, *(None,) * (ndim - 2), axes.tensor)
  return split_inputs(axes) if split == "inputs" else P(axes.fsdp)


# Collectives.


def size_of(axis: str | None) -> int:
  """Returns the number of devices along an axis of the mesh; 1 for None."""
  return 1 if axis is None else lax.axis_size(axis)


def tensor_size(axes: MeshAxes | None) -> int:
  """Returns the number of devices that heads and columns are split over."""
  return 1 if axes is None else size_of(axes.tensor)


def expert_size(axes: MeshAxes | None) -> int:
  """Returns the number of devices that experts are split over."""
  return 1 if axes is None else size_of(axes.expert)


def token_shards(axes: MeshAxes | None) -> int:
  """Returns the number of devices that tokens are split over."""
  return 1 if axes is None else math.prod(map(size_of, axes.tokens))


def scale_axes(axes: MeshAxes | None) -> tuple[str, ...]:
  """Returns the mesh axes over which the shards of a tensor share a scale."""
  if axes is None:
    # In a caller's own `shard_map`, any axis may split the tensor.
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
  return axes.tokens


def gather_experts(w: Array, axes: MeshAxes | None) -> Array:
  """Gathers experts' weights [E, D, F] along D, over the FSDP axis."""
  if axes is None or size_of(axes.fsdp) == 1:
    return w
  # With axis=1, XLA would choose a layout with D outermost, and would transpose
  # the weights of all layers before the scan over layers.
  shards = lax.all_gather(w, axes.fsdp, axis=0)
  experts, _, features = w.shape
  return jnp.moveaxis(shards, 0, 1).reshape(experts, -1, features)


def reduce_gradient(
  dw: Array,
  axes: MeshAxes | None,
  *,
  has_columns: bool,
  is_of_experts: bool = False,
) -> Array:
  """Sums a weight's gradient over devices; returns the device's rows.

  dw [D, ..., F] is the gradient from one device's tokens. If `has_columns`,
  devices along the tensor axis process the same tokens, and have different
  columns or rows of dw, so dw is not summed over this axis. Otherwise, these
  devices process different tokens, and dw is summed. Gradients of experts are
  not summed over the expert axis, because experts have already received the
  tokens of all devices along that axis.
  """
  if axes is None:
    return dw
  over = [name for name in axes.batch if name != axes.fsdp]
  if is_of_experts:
    over = [name for name in over if name != axes.expert]
  if axes.tensor is not None and not has_columns:
    over.append(axes.tensor)
  if size_of(axes.fsdp) > 1:
    dw = lax.psum_scatter(dw, axes.fsdp, scatter_dimension=0, tiled=True)
  return _sum(dw, over)


def sum_tokens(
  x: Array, axes: MeshAxes | None, *, all_positions: bool = False
) -> Array:
  """Sums x, which each device computed from its own tokens, over devices.

  If each device computed x from whole sequences and from its shard of the
  columns, pass `all_positions`: x is then not summed over the tensor axis.
  """
  if axes is None:
    return x
  return _sum(x, axes.batch if all_positions else axes.tokens)


def gather_positions[Tree](tree: Tree, axes: MeshAxes | None) -> Tree:
  """Gathers whole sequences [B, T, ...] from the positions on each device."""
  if axes is None or size_of(axes.tensor) == 1:
    return tree

  def gathered(x):
    check_has_positions(x)
    return lax.all_gather(x, axes.tensor, axis=1, tiled=True)

  return jax.tree.map(gathered, tree)


def scatter_sequence(y: Array, axes: MeshAxes | None) -> Array:
  """Sums partial results [B, T, D]; each device keeps its shard of T."""
  if axes is None or size_of(axes.tensor) == 1:
    return y
  check_has_positions(y)
  devices = size_of(axes.tensor)
  if y.shape[1] % devices:
    raise ValueError(
      "layers: the sequence length must be a multiple of the tensor axis's "
      f"size, got {y.shape[1]} positions and {devices} devices; pad sequences"
    )
  return lax.psum_scatter(y, axes.tensor, scatter_dimension=1, tiled=True)


def check_has_positions(x: Array) -> None:
  """Raises a ValueError if x has no dimension T that the tensor axis splits."""
  if x.ndim < 3:
    raise ValueError(
      "layers: with several devices along the tensor axis, x must be "
      f"[B, T, D], got rows of {x.shape[-1]} values; reshape rows to sequences"
    )


def _sum(x: Array, names: Iterable[str]) -> Array:
  names = tuple(name for name in names if size_of(name) > 1)
  return lax.psum(x, names) if names else x
