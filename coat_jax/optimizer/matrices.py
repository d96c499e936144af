# SPDX-License-Identifier: Apache-2.0
"""Splits parameters into matrices for Muon, and orthogonalizes the matrices.

A leaf may contain many matrices: a stack of layers, gate and up, or q, k and v
in the columns of one weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers

from coat_jax.mesh import axes_in, run_whole, spec_of
from coat_jax.numerics.checks import check_function
from coat_jax.optimizer.masks import check_leaf, is_norm_or_bias


class MatrixSplit(NamedTuple):
  """Describes how a leaf is split into matrices.

  This class adds `parts` and `groups` to `optax.contrib.MuonDimensionNumbers`.
  Axes in neither `reduction_axis` nor `output_axis` are batch axes (layers,
  experts, or gate and up): each index along them selects separate matrices.

  Attributes:
    reduction_axis: axis or axes that a matmul with the weight contracts.
    output_axis: axis or axes of the weight's columns; the last one must be the
      leaf's last axis.
    parts: how many consecutive columns of a group belong to each matrix (for
      example to q, to k and to v); () for one matrix.
    groups: how often `parts` repeats along the columns. The columns of part i
      in all groups form one matrix.
  """

  reduction_axis: Sequence[int] | int = -2
  output_axis: Sequence[int] | int = -1
  parts: tuple[int, ...] = ()
  groups: int = 1

  @property
  def inputs(self) -> tuple[int, ...]:
    """`reduction_axis` as a tuple."""
    return _as_tuple(self.reduction_axis)

  @property
  def outputs(self) -> tuple[int, ...]:
    """`output_axis` as a tuple."""
    return _as_tuple(self.output_axis)


def _as_tuple(axes: Sequence[int] | int) -> tuple[int, ...]:
  return (axes,) if isinstance(axes, int) else tuple(axes)


Matrices = Callable[[str, Any], MatrixSplit | MuonDimensionNumbers | None]

# Coefficients of the Newton-Schulz iteration that Muon's authors use.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class NewtonSchulz(NamedTuple):
  """The arguments of `coat_muon` that control the orthogonalization."""

  coefficients: tuple[float, float, float]
  steps: int | Array
  eps: ArrayLike
  consistent_rms: ArrayLike | None


_TABLES = ("embed", "head", "router")


def hidden_matrices(path: str, leaf: Any) -> MatrixSplit | None:
  """Treats real 2D leaves as matrices, except tables, norms and biases.

  Tables are leaves whose path contains `embed`, `head` or `router`.

  Args:
    path: the leaf's path, such as "blocks/0/attn/out/kernel".
    leaf: array or `jax.ShapeDtypeStruct`.

  Returns:
    `MatrixSplit()`, one matrix [inputs, outputs]; None for all other leaves.

  Raises:
    TypeError: `path` is not a string, or `leaf` is not an array.
    ValueError: the leaf contains q, k and v of a `models.Decoder`.
  """
  check_leaf("hidden_matrices", path, leaf)
  if path.endswith("qkv/linear/kernel") and leaf.ndim == 3:
    raise ValueError(
      "hidden_matrices: q, k and v of a Decoder must be split, got "
      f"{path!r} {list(leaf.shape)}; pass "
      "matrices=models.model_matrices(model.config)"
    )
  if leaf.ndim != 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
    return None
  is_table = any(name in path.lower() for name in _TABLES)
  return None if is_table or is_norm_or_bias(path, leaf) else MatrixSplit()


def checked_matrices(
  op: str, matrices: Matrices | None
) -> Callable[[str, Any], MatrixSplit | None]:
  """Returns `matrices` (default: `hidden_matrices`) with checked results."""
  matrices = hidden_matrices if matrices is None else matrices
  remedy = "pass a function (path, leaf) -> MatrixSplit | None"
  check_function(op, "matrices", matrices, remedy)

  def split_of(path: str, leaf: Any) -> MatrixSplit | None:
    split = matrices(path, leaf)
    if split is None or isinstance(split, MatrixSplit):
      return split
    if isinstance(split, MuonDimensionNumbers):
      return MatrixSplit(*split)
    raise TypeError(
      f"{op}: matrices must return a MatrixSplit, or None for a leaf without "
      f"matrices, got {split!r} for {list(jnp.shape(leaf))} at {path!r}; "
      "return MatrixSplit() for one matrix [inputs, outputs]"
    )

  return split_of


def check_split(op: str, path: str, leaf: Any, split: MatrixSplit) -> None:
  """Raises a ValueError if a leaf cannot be split as specified."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise ValueError(
      f"{op}: matrices must be real, got {leaf.dtype} at {path!r}; return None "
      "for it"
    )
  named = split.inputs + split.outputs
  axes = [axis % max(leaf.ndim, 1) for axis in named]
  is_apart = len({*axes}) == len(axes)
  is_there = all(-leaf.ndim <= axis < leaf.ndim for axis in named)
  wrong = not (split.inputs and split.outputs and is_apart and is_there)
  if wrong or axes[-1] != leaf.ndim - 1:
    raise ValueError(
      f"{op}: a MatrixSplit must name different axes of the leaf, and its last "
      f"output must be the leaf's last axis, got {split} for "
      f"{list(leaf.shape)} at {path!r}; MatrixSplit() is one matrix "
      "[inputs, outputs]"
    )
  columns = split.groups * sum(split.parts)
  is_whole = not split.parts or columns == leaf.shape[-1]
  sizes = split.groups, *split.parts
  if min(sizes) < 1 or leaf.shape[-1] % split.groups or not is_whole:
    raise ValueError(
      f"{op}: the parts of all groups must add up to {leaf.shape[-1]} columns, "
      f"got {split.groups} times {split.parts} at {path!r}; change parts or "
      "groups"
    )


def split_columns(x: Array, split: MatrixSplit) -> list[Array]:
  """Splits [..., columns] into the parts of a `MatrixSplit`, in order."""
  columns = x.reshape(*x.shape[:-1], split.groups, -1)
  ends = [sum(split.parts[:i]) for i in range(1, len(split.parts))]
  parts = jnp.split(columns, ends, axis=-1)
  return [part.reshape(*x.shape[:-1], -1) for part in parts]


def join_columns(parts: Sequence[Array], split: MatrixSplit) -> Array:
  """Inverts `split_columns`."""
  if len(parts) == 1:
    return parts[0]
  shape = parts[0].shape[:-1]
  columns = [part.reshape(*shape, split.groups, -1) for part in parts]
  return jnp.concatenate(columns, axis=-1).reshape(*shape, -1)


def _axes_in_order(split: MatrixSplit, ndim: int) -> list[int]:
  """Lists a leaf's axes in the order batch, inputs, outputs."""
  named = [axis % ndim for axis in split.inputs + split.outputs]
  return [axis for axis in range(ndim) if axis not in named] + named


def split_matrices(x: Array, split: MatrixSplit) -> list[Array]:
  """Splits a leaf into matrices [inputs, outputs], in the order of batch axes.

  A bias [columns] is split like the columns of its weight.
  """
  if x.ndim == 1:
    return split_columns(x, split)
  order = _axes_in_order(split, x.ndim)
  columns = math.prod(x.shape[axis] for axis in split.outputs)
  rows = math.prod(x.shape[axis] for axis in split.inputs)
  leaves = x.transpose(order).reshape(-1, rows, columns)
  return [part for leaf in leaves for part in split_columns(leaf, split)]


def join_matrices(
  matrices: Sequence[Array], split: MatrixSplit, shape: tuple[int, ...]
) -> Array:
  """Inverts `split_matrices` for a leaf of this shape."""
  if len(shape) == 1:
    return join_columns(matrices, split)
  order = _axes_in_order(split, len(shape))
  count = max(len(split.parts), 1)
  leaves = [
    join_columns(matrices[i : i + count], split)
    for i in range(0, len(matrices), count)
  ]
  x = jnp.stack(leaves) if len(leaves) > 1 else leaves[0]
  x = x.reshape([shape[axis] for axis in order])
  return x.transpose([order.index(axis) for axis in range(len(shape))])


def map_matrices(
  f: Callable[[Array], Array],
  x: Array,
  split: MatrixSplit,
  sharding: NamedSharding | None,
) -> Array:
  """Applies f to a leaf's matrices [..., inputs, outputs], layer by layer."""
  order = _axes_in_order(split, x.ndim)
  matrix_ndim = len(split.inputs + split.outputs)
  rows = math.prod(x.shape[axis] for axis in split.inputs)

  def one(x, spec):
    """Applies f to one index of the first batch axis, or to a whole leaf."""
    lead = x.ndim - matrix_ndim
    # Shard rows like the first input axis, and columns like the last output
    # axis. If no other input or output axes exist, reshaping moves no data
    # between devices.
    where = *spec[:lead], spec[lead], spec[-1]

    def of_matrix(matrix):
      return constrain(f(constrain(matrix, sharding, where)), sharding, where)

    parts = split_columns(x.reshape(*x.shape[:lead], rows, -1), split)
    whole = join_columns([of_matrix(part) for part in parts], split)
    return constrain(whole.reshape(x.shape), sharding, spec)

  axes = (None,) * x.ndim
  if sharding is not None:
    axes = (*sharding.spec, *axes)[: x.ndim]
  spec = tuple(axes[i] for i in order)
  x = x.transpose(order)
  if x.ndim > matrix_ndim:
    x = jax.lax.map(lambda layer: one(layer, spec[1:]), x)
  else:
    x = one(x, spec)
  return x.transpose([order.index(i) for i in range(x.ndim)])


def constrain(x: Array, sharding: NamedSharding | None, spec: tuple) -> Array:
  """Constrains x to `spec` on the mesh of `sharding`."""
  if sharding is None:
    return x
  if jax.sharding.get_abstract_mesh().empty:
    where = NamedSharding(sharding.mesh, jax.P(*spec))  # pyright: ignore[reportArgumentType]
  else:
    where = jax.P(*spec)
  return jax.lax.with_sharding_constraint(x, where)


def newton_schulz(
  x: Array, options: NewtonSchulz, sharding: NamedSharding | None
) -> Array:
  """Orthogonalizes f32 [..., m, n]: moves singular values close to 1.

  Each step of the quintic iteration is x <- a x + (b A + c A^2) x, where
  A = x x^T. With `sharding`, the devices that store shards of the leaf split
  the longer axis if they can split it evenly. A step then communicates only to
  sum the devices' x x^T.
  """
  a, b, c = options.coefficients
  is_tall = x.shape[-2] > x.shape[-1]
  x = x.mT if is_tall else x
  lead = (None,) * (x.ndim - 2)
  # The mesh axes that split the leaf, if they can split the longer axis.
  names = ()
  if sharding is not None:
    names = axes_in(sharding.spec)
    if x.shape[-1] % math.prod(sharding.mesh.shape[name] for name in names):
      names = ()
  by_columns = (*lead, None, names)
  if names:
    x = constrain(x, sharding, by_columns)
  norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  x = x / (norm + options.eps)

  def step(x):
    gram = x @ x.mT
    if names:
      gram = constrain(gram, sharding, (*lead, None, None))
    x = a * x + (b * gram + c * gram @ gram) @ x
    # Without this, XLA would split the last matmul by rows, and gather x.
    return constrain(x, sharding, by_columns) if names else x

  if isinstance(options.steps, jax.Array):
    x = jax.lax.fori_loop(0, options.steps, lambda _, x: step(x), x)
  else:
    for _ in range(options.steps):
      x = step(x)
  return x.mT if is_tall else x


def orthogonalize(
  x: Array,
  split: MatrixSplit,
  sharding: NamedSharding | None,
  options: NewtonSchulz,
) -> Array:
  """Orthogonalizes a leaf's matrices; scales each according to its shape."""

  def whole(x, options):
    def f(x):
      rows, columns = x.shape[-2:]
      scale = max(1, columns / rows) ** 0.5
      if options.consistent_rms is not None:
        scale = max(rows, columns) ** 0.5 * options.consistent_rms
      return scale * newton_schulz(x, options, sharding)

    return map_matrices(f, x, split=split, sharding=sharding)

  # On explicit axes, types would determine which matmuls sum over devices. We
  # make the axes automatic, so that the constraints above determine this.
  mesh = None if sharding is None else sharding.mesh
  return run_whole(whole, x, options, out_specs=spec_of(x), mesh=mesh)
