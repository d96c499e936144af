# SPDX-License-Identifier: Apache-2.0
"""Converts and checks states with FP8 arrays, to save and restore them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from coat_jax.numerics.checks import flatten_like
from coat_jax.optimizer.masks import node_path


def to_integers(tree: Any) -> Any:
  """Converts FP8 and bfloat16 arrays to uint8 and uint16 with the same bits.

  Arrays of int4 also become uint8: each byte contains the four bits of a value.
  Most file formats support unsigned integers, but not FP8, bfloat16 and int4;
  `np.savez` and `np.load`, for example, lose these dtypes.

  Args:
    tree: a tree of arrays or `jax.ShapeDtypeStruct`s, such as a train state.

  Returns:
    A tree of the same structure and shardings. All other leaves are unchanged.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import from_integers, to_integers
    >>> optimizer, params = coat_adamw(1e-3), {"w": jnp.ones((64, 128))}
    >>> integers = to_integers(optimizer.init(params))
    >>> print(integers[0].mu.codes["w"].dtype)
    uint8
    >>> like = jax.eval_shape(optimizer.init, params)
    >>> print(from_integers(integers, like)[0].mu.codes["w"].dtype)
    float8_e4m3fn
  """
  return jax.tree.map(
    lambda x: _view(x, _unsigned(x)) if _is_foreign(x) else x, tree
  )


def from_integers(tree: Any, like: Any) -> Any:
  """Inverts `to_integers`.

  Args:
    tree: the result of `to_integers`, possibly read from a file; NumPy arrays
      stay NumPy arrays.
    like: a tree of the same structure with the original dtypes, such as
      `jax.eval_shape(optimizer.init, params)` with the same codec.

  Returns:
    `tree` with the dtypes of `like`.

  Raises:
    ValueError: the trees' structures differ, or an array of unsigned integers
      does not fit its FP8, bfloat16 or int4 leaf in `like`.
  """

  def view(keys, want, x):
    if not _is_foreign(want):
      return x
    if (x.dtype, x.shape) != (_unsigned(want), want.shape):
      raise ValueError(
        f"from_integers: {want.dtype}{list(want.shape)} must be stored as "
        f"{_unsigned(want)}, got {x.dtype}{list(x.shape)} at "
        f"{node_path(keys)!r}; pass as `like` the tree that to_integers was "
        "given, or its jax.eval_shape"
      )
    return _view(x, want.dtype)

  remedy = (
    "pass as `like` the tree that to_integers was given, or its jax.eval_shape"
  )
  treedef = jax.tree.structure(like)
  found = flatten_like("from_integers", "tree", tree, "like", treedef, remedy)
  return jax.tree.map_with_path(view, like, treedef.unflatten(found))


def check_stored(stored: Any, target: Any) -> None:
  """Raises unless a checkpoint has the target's leaves, dtypes and shapes.

  Orbax silently casts to the target's dtypes, so it would restore one codec's
  state as another codec's state, with wrong moments. This check cannot
  distinguish codecs whose states have the same dtypes and shapes.

  Args:
    stored: Orbax's `checkpointer.metadata(path)`, or a tree whose leaves have a
      shape and a dtype.
    target: the tree to restore, which may be a part of the tree that was saved.
      Only its arrays and `jax.ShapeDtypeStruct`s are compared; random keys and
      other leaves are skipped.

  Raises:
    ValueError: a leaf of `target` is not stored, or is stored with another
      dtype or shape; or `stored` is empty.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax.optimizer import check_stored
    >>> from coat_jax import coat_adamw
    >>> params = {"w": jnp.ones((64, 128))}
    >>> stored = jax.eval_shape(coat_adamw(1e-3).init, params)
    >>> check_stored(stored, stored)
  """
  # Compare paths, because Orbax does not store the types of nodes.
  leaves = tree_leaves_with_path(getattr(stored, "item_metadata", stored))
  saved = {node_path(keys): leaf for keys, leaf in leaves}
  if not saved:
    # A CheckpointManager has no handler until it has saved or restored.
    raise ValueError(
      "check_stored: stored must have the leaves of a checkpoint, got none in "
      f"a {type(stored).__name__}; if it is from Orbax's CheckpointManager, "
      "create the manager with item_handlers=StandardCheckpointHandler() "
      "(without it, metadata can be read only after a save or a restore)"
    )
  for keys, leaf in tree_leaves_with_path(target):
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
      continue
    path, want = node_path(keys), _dtype_and_shape(leaf)
    found = _dtype_and_shape(saved[path]) if path in saved else "nothing"
    if want != found:
      raise ValueError(
        f"check_stored: target must match the checkpoint, got {want} at "
        f"{path!r}, where the checkpoint has {found}; make the target for the "
        "same parameters, with the optimizer and codec of the saved state"
      )


def _dtype_and_shape(x: Any) -> str:
  return f"{np.dtype(x.dtype)}{list(x.shape)}"


def _is_foreign(x: Any) -> bool:
  """Returns whether NumPy lacks a leaf's dtype: int4, FP8 or bfloat16."""
  dtype = getattr(x, "dtype", None)
  if dtype == jnp.int4:
    return True
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    return False
  return np.dtype(dtype).isbuiltin != 1


def _unsigned(x: Any) -> np.dtype:
  return np.dtype(f"uint{8 * np.dtype(x.dtype).itemsize}")


def _view(x: Any, dtype: Any) -> Any:
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  if isinstance(x, np.ndarray):
    return x.view(dtype)
  if x.dtype == jnp.int4:
    return jax.lax.bitcast_convert_type(x, jnp.uint4).astype(dtype)
  if dtype == jnp.int4:
    x = x.astype(jnp.uint4)
  return jax.lax.bitcast_convert_type(x, dtype)
