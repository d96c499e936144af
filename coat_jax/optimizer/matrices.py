# SPDX-License-Identifier: Apache-2.0
"""Parameters as matrices: how a leaf is cut into them, and their orthogonals.

Muon orthogonalizes matrices. A leaf may hold many: a stack of layers, gate and
up, q, k and v in the columns of one product. A function of (path, leaf) says
how it is cut: `hidden_matrices` for models whose weights are 2-D leaves,
`decoder_matrices` for `models.Decoder`, or one of the user's own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from coat_jax.checks import COUNT, check_function, check_whole
from coat_jax.optimizer.masks import check_leaf, is_norm_or_bias


class MatrixSplit(NamedTuple):
  """How a leaf is cut into matrices.

  Each index of the axes that are in neither field has matrices of its own:
  layers, experts, gate and up.

  Attributes:
    inputs: axes over which the product with the weight sums.
    outputs: axes of the product's columns; the last of them is the leaf's last.
    parts: consecutive columns that are matrices apart, such as the widths of q,
      k and v; () for one matrix.
    groups: how often `parts` come one after another: part i of all groups is
      one matrix.
  """

  inputs: tuple[int, ...] = (-2,)
  outputs: tuple[int, ...] = (-1,)
  parts: tuple[int, ...] = ()
  groups: int = 1


Matrices = Callable[[str, Any], MatrixSplit | None]

_TABLES = ("embed", "head", "router")
_UNCUT = "qkv/linear/kernel"
# Of a `models.Decoder`: ends of paths, with the number of axes.
_DECODER = {
  ("attention/out/kernel", 3): MatrixSplit(),
  ("mlp/up/kernel", 3): MatrixSplit(),
  ("mlp/down/kernel", 3): MatrixSplit(),
  ("mlp/gate_up/kernel", 4): MatrixSplit((-3,)),
  ("mlp/gate_up", 5): MatrixSplit((-3,)),
  ("mlp/down", 4): MatrixSplit(),
}


def hidden_matrices(path: str, leaf: Any) -> MatrixSplit | None:
  """Takes every real leaf of two axes for a matrix, but for tables.

  Tables are leaves whose path says `embed`, `head` or `router`; norms and
  biases, which may be stacked, are no matrices either.

  Args:
    path: such as "blocks/0/attn/out/kernel".
    leaf: array or `jax.ShapeDtypeStruct`.

  Returns:
    One matrix [inputs, outputs], or None.

  Raises:
    TypeError: `path` is no text or `leaf` no array.
    ValueError: the leaf is a `models.Decoder`'s, which `decoder_matrices` cuts.
  """
  check_leaf("hidden_matrices", path, leaf)
  if path.endswith(_UNCUT) and leaf.ndim == 3:
    raise ValueError(
      "hidden_matrices: q, k and v of a Decoder must be cut apart, got "
      f"{path!r} {list(leaf.shape)}; pass matrices=decoder_matrices(num_heads="
      "..., num_kv_heads=...)"
    )
  if leaf.ndim != 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
    return None
  is_table = any(name in path.lower() for name in _TABLES)
  return None if is_table or is_norm_or_bias(path, leaf) else MatrixSplit()


def decoder_matrices(*, num_heads: int, num_kv_heads: int) -> Matrices:
  """How the parameters of a `models.Decoder` are cut.

  Each layer of a stack, q, k, v, gate, up and each expert are matrices apart.
  Embeddings, the head, routers, norms and biases are none.

  Args:
    num_heads: query heads.
    num_kv_heads: key heads, by which the columns of q, k and v are ordered.

  Returns:
    The function of (path, leaf) that `coat_muon` takes as `matrices`.

  Raises:
    TypeError: a number of heads is no whole number.
    ValueError: it is below 1, `num_heads` is no multiple of `num_kv_heads`; or,
      by the function, columns are not those of so many heads.

  Examples:
    >>> import jax
    >>> from coat_jax import decoder_matrices
    >>> matrices = decoder_matrices(num_heads=4, num_kv_heads=2)
    >>> kernel = jax.ShapeDtypeStruct((2, 64, 128), "float32")
    >>> matrices("layers/attention/qkv/linear/kernel", kernel).parts
    (32, 16, 16)
  """

  op, remedy = "decoder_matrices", "pass those of the model's config"
  check_whole(op, "num_heads", num_heads, COUNT, remedy)
  check_whole(op, "num_kv_heads", num_kv_heads, COUNT, remedy)
  if num_heads % num_kv_heads:
    raise ValueError(
      f"{op}: num_heads must be a multiple of num_kv_heads, got {num_heads} "
      f"and {num_kv_heads}; {remedy}"
    )

  def matrices(path: str, leaf: Any) -> MatrixSplit | None:
    check_leaf(op, path, leaf)
    if path.endswith(_UNCUT):
      width, rest = divmod(leaf.shape[-1], num_heads + 2 * num_kv_heads)
      if rest:
        raise ValueError(
          f"{op}: columns of q, k and v must be those of {num_heads} heads and "
          f"twice {num_kv_heads}, got {list(leaf.shape)} at {path!r}; {remedy}"
        )
      parts = num_heads // num_kv_heads * width, width, width
      return MatrixSplit(parts=parts, groups=num_kv_heads)
    for (end, ndim), split in _DECODER.items():
      if path.endswith(end) and leaf.ndim == ndim:
        return split
    return None

  return matrices


def checked_matrices(op: str, matrices: Matrices | None) -> Matrices:
  """`matrices`, `hidden_matrices` for None; a TypeError for what is neither."""
  if matrices is None:
    return hidden_matrices
  remedy = "pass decoder_matrices(...), or (path, leaf) -> MatrixSplit | None"
  check_function(op, "matrices", matrices, remedy)
  return matrices


def split_of(
  op: str, matrices: Matrices, path: str, leaf: Any
) -> MatrixSplit | None:
  """What `matrices` says of a leaf; a TypeError where it is something else."""
  split = matrices(path, leaf)
  if split is None or isinstance(split, MatrixSplit):
    return split
  raise TypeError(
    f"{op}: matrices must return a MatrixSplit, or None for what is no matrix, "
    f"got {split!r} for {list(jnp.shape(leaf))} at {path!r}; return "
    "MatrixSplit() for one matrix [inputs, outputs]"
  )


def check_split(op: str, path: str, leaf: Any, split: MatrixSplit) -> None:
  """Raises a ValueError where a leaf cannot be cut so."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise ValueError(
      f"{op}: matrices must be real, got {leaf.dtype} at {path!r}; return None "
      "for it"
    )
  named = split.inputs + split.outputs
  axes = [axis % max(leaf.ndim, 1) for axis in named]
  is_apart = len({*axes}) == len(axes) <= leaf.ndim
  is_there = all(-leaf.ndim <= axis < leaf.ndim for axis in named)
  wrong = not (split.inputs and split.outputs and is_apart and is_there)
  if wrong or axes[-1] != leaf.ndim - 1:
    raise ValueError(
      f"{op}: a MatrixSplit must name different axes of the leaf, the last one "
      f"among its outputs, got {split} for {list(leaf.shape)} at {path!r}; "
      "MatrixSplit() is one matrix [inputs, outputs]"
    )
  columns = split.groups * sum(split.parts)
  is_whole = not split.parts or columns == leaf.shape[-1]
  sizes = split.groups, *split.parts
  if min(sizes) < 1 or leaf.shape[-1] % split.groups or not is_whole:
    raise ValueError(
      f"{op}: the parts of all groups must have the {leaf.shape[-1]} columns, "
      f"got {split.groups} times {split.parts} at {path!r}; return parts that "
      "add up"
    )


def map_matrices(
  f: Callable[[Array], Array],
  x: Array,
  split: MatrixSplit,
  sharding: NamedSharding | None = None,
) -> Array:
  """Replaces the matrices of a leaf, a layer of a stack at a time.

  Args:
    f: [..., inputs, outputs] to the same shape.
    x: the leaf.
    split: how it is cut.
    sharding: the leaf's, which the result gets; None leaves it to XLA.

  Returns:
    The leaf of these matrices.
  """
  inputs, outputs = (
    tuple(axis % x.ndim for axis in axes)
    for axes in (split.inputs, split.outputs)
  )
  batch = tuple(i for i in range(x.ndim) if i not in inputs + outputs)
  order = batch + inputs + outputs
  rows = math.prod(x.shape[i] for i in inputs)

  def one(x, spec):
    """Of a leaf without its first axis of a batch, or of all of it."""
    lead = x.ndim - len(inputs + outputs)
    columns = x.reshape(*x.shape[:lead], rows, split.groups, -1)
    ends = [sum(split.parts[:i]) for i in range(1, len(split.parts))]
    # Rows are split as the first of their axes is, columns as the last is:
    # reshaping moves nothing then.
    where = *spec[:lead], spec[lead], spec[-1]

    def of_matrix(part):
      matrix = part.reshape(*x.shape[:lead], rows, -1)
      new = place(f(place(matrix, sharding, where)), sharding, where)
      return new.reshape(part.shape)

    new = [of_matrix(part) for part in jnp.split(columns, ends, axis=-1)]
    whole = jnp.concatenate(new, axis=-1) if len(new) > 1 else new[0]
    return place(whole.reshape(x.shape), sharding, spec)

  axes = (None,) * x.ndim
  if sharding is not None:
    axes = (*sharding.spec, *axes)[: x.ndim]
  spec = tuple(axes[i] for i in order)
  x = x.transpose(order)
  if batch:
    x = jax.lax.map(lambda layer: one(layer, spec[1:]), x)
  else:
    x = one(x, spec)
  return x.transpose([order.index(i) for i in range(x.ndim)])


def place(x: Array, sharding: NamedSharding | None, spec: tuple) -> Array:
  """x with axes sharded as `spec` says, on the mesh of `sharding`."""
  if sharding is None:
    return x
  if jax.sharding.get_abstract_mesh().empty:
    where = NamedSharding(sharding.mesh, jax.P(*spec))  # pyright: ignore[reportArgumentType]
  else:
    where = jax.P(*spec)
  return jax.lax.with_sharding_constraint(x, where)


def newton_schulz(
  x: Array,
  coefficients: tuple[float, float, float],
  steps: int | Array,
  eps: ArrayLike,
  sharding: NamedSharding | None = None,
) -> Array:
  """Matrices whose singular values are near 1, by a quintic iteration.

  On a mesh the longer axis is split over all devices that have shares of the
  leaf: a device multiplies its columns, and what devices exchange is the sum of
  their shares of x x^T, as large as the shorter axis squared.

  Args:
    x: f32 [..., m, n].
    coefficients: a, b and c of x <- a x + (b A + c A^2) x, A = x x^T.
    steps: how many times; an int32 scalar where only the running program knows
      it, as with `optax.inject_hyperparams`.
    eps: added to the Frobenius norm, by which x is divided first.
    sharding: of the leaf that x is of; None leaves partitioning to XLA.

  Returns:
    f32 [..., m, n].

  Source: Jordan et al., Muon, 2024; `optax.contrib.muon`.
  """
  a, b, c = coefficients
  is_tall = x.shape[-2] > x.shape[-1]
  x = jnp.swapaxes(x, -1, -2) if is_tall else x
  lead = (None,) * (x.ndim - 2)
  names = _names(sharding, x.shape[-1])
  by_columns = (*lead, None, names)
  if names:
    x = place(x, sharding, by_columns)
  norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  x = x / (norm + eps)

  def step(x):
    gram = x @ jnp.swapaxes(x, -1, -2)
    if names:
      gram = place(gram, sharding, (*lead, None, None))
    x = a * x + (b * gram + c * gram @ gram) @ x
    # Else the last product would be of rows, and gather x.
    return place(x, sharding, by_columns) if names else x

  if isinstance(steps, jax.Array):
    x = jax.lax.fori_loop(0, steps, lambda _, x: step(x), x)
  else:
    for _ in range(steps):
      x = step(x)
  return jnp.swapaxes(x, -1, -2) if is_tall else x


def _names(sharding: NamedSharding | None, size: int) -> tuple[str, ...]:
  """The mesh axes that split a leaf, where they can split `size` too."""
  if sharding is None:
    return ()
  names: list[str] = []
  for axes in sharding.spec:
    names += axes if isinstance(axes, tuple) else [axes] if axes else []
  count = math.prod(sharding.mesh.shape[name] for name in names)
  return tuple(names) if size % count == 0 else ()


def orthogonalize(
  x: Array,
  split: MatrixSplit,
  sharding: NamedSharding | None,
  *,
  coefficients: tuple[float, float, float],
  steps: int | Array,
  eps: ArrayLike,
  consistent_rms: ArrayLike | None,
) -> Array:
  """The matrices of a leaf, orthogonalized and scaled by their shapes.

  Args:
    x: f32, the leaf.
    split: how it is cut.
    sharding: the leaf's, or None where it is not known.
    coefficients, steps, eps: of `newton_schulz`.
    consistent_rms: scales by sqrt(max(inputs, outputs)) times this; None by
      sqrt(max(1, outputs / inputs)).

  Returns:
    f32, the leaf.
  """

  def f(x):
    rows, columns = x.shape[-2:]
    scale = max(1, columns / rows) ** 0.5
    if consistent_rms is not None:
      scale = max(rows, columns) ** 0.5 * consistent_rms
    return scale * newton_schulz(x, coefficients, steps, eps, sharding)

  whole: Any = functools.partial(
    map_matrices, f, split=split, sharding=sharding
  )
  if sharding is not None and jax.sharding.get_abstract_mesh().explicit_axes:
    # Which products sum over devices is said by constraints, not by types.
    whole = jax.sharding.auto_axes(whole, out_sharding=sharding.spec)
  return whole(x)
