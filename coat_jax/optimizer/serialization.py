# SPDX-License-Identifier: Apache-2.0
"""States in files: what must be known of them before they are read.

NumPy, and what is built on it, has no FP8: `np.savez` writes bytes that
`np.load` does not take for numbers again. An integer of the same width has the
same bits and is known everywhere.

Orbax knows FP8, and casts what it reads to the dtypes of the target: codes of
another codec become numbers that mean something else. `check_stored` compares
the dtypes first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_integers(tree: Any) -> Any:
  """A tree whose FP8 and bfloat16 arrays are uint8 and uint16, bit for bit.

  Args:
    tree: such as an optimizer's state, or a whole train state; of arrays or of
      `jax.ShapeDtypeStruct`s.

  Returns:
    The same tree and shardings; leaves of other kinds are as they were.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_adamw, to_integers
    >>> state = coat_adamw(1e-3).init({"w": jnp.ones((64, 128))})
    >>> print(to_integers(state)[0].mu_codes["w"].dtype)
    uint8
  """
  return jax.tree.map(
    lambda x: _view(x, _unsigned(x)) if _is_foreign(x) else x, tree
  )


def from_integers(tree: Any, like: Any) -> Any:
  """The inverse of `to_integers`.

  Args:
    tree: what `to_integers` gave, perhaps from a file; NumPy arrays stay so.
    like: a tree of its structure with the dtypes that it had, such as
      `jax.eval_shape(optimizer.init, params)`. Formats of one width cannot be
      told apart: it must be of the same codec.

  Returns:
    `tree` with the dtypes of `like`.

  Raises:
    ValueError: the trees' structures differ, or an array has not the shape or
      the width that `like` says.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import coat_adamw, from_integers, to_integers
    >>> params, optimizer = {"w": jnp.ones((64, 128))}, coat_adamw(1e-3)
    >>> state = optimizer.init(params)
    >>> like = jax.eval_shape(optimizer.init, params)
    >>> print(from_integers(to_integers(state), like)[0].mu_codes["w"].dtype)
    float8_e4m3fn
  """

  def view(keys, want, x):
    if not _is_foreign(want):
      return x
    if (x.dtype, x.shape) != (_unsigned(want), want.shape):
      path = jax.tree_util.keystr(keys, simple=True, separator="/")
      raise ValueError(
        f"from_integers: {want.dtype}{list(want.shape)} must be stored as "
        f"{_unsigned(want)}, got {x.dtype}{list(x.shape)} at {path!r}; pass as "
        "like what was given to to_integers, or its shapes"
      )
    return _view(x, want.dtype)

  treedef = jax.tree.structure(like)
  try:
    found = treedef.flatten_up_to(tree)
  except ValueError as error:
    raise ValueError(
      f"from_integers: tree must have the structure of like, {treedef}, got "
      f"{jax.tree.structure(tree)}; pass as like what was given to "
      "to_integers, or its shapes"
    ) from error
  return jax.tree.map_with_path(view, like, treedef.unflatten(found))


def check_stored(stored: Any, target: Any) -> None:
  """Raises where a checkpoint has other dtypes or shapes than its target.

  Orbax casts to the target's dtypes without a word, so that a state of one
  codec is restored as a state of another whose moments are wrong.

  Args:
    stored: what the checkpoint has, by Orbax's `checkpointer.metadata(path)`:
      that, or a tree whose leaves have a shape and a dtype.
    target: the tree that is to be restored, or a part of the tree that was
      saved; of arrays or of `jax.ShapeDtypeStruct`s. Leaves of other kinds, and
      random keys, are not compared.

  Raises:
    ValueError: a leaf of `target` is stored with another dtype or shape, or not
      at all; or `stored` is empty. Codecs whose states have the same dtypes and
      shapes cannot be told apart.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from coat_jax import check_stored, coat_adamw, codecs
    >>> params = {"w": jnp.ones((64, 128))}
    >>> stored = jax.eval_shape(coat_adamw(1e-3).init, params)
    >>> other = coat_adamw(1e-3, codec=codecs.log8())
    >>> check_stored(stored, stored)
    >>> check_stored(stored, jax.eval_shape(other.init, params))
    Traceback (most recent call last):
      ...
    ValueError: check_stored: target must have the dtypes and shapes that are \
stored, got int8[64, 128] for float8_e4m3fn[64, 128] at '0/mu_codes/w'; make \
the target of the same parameters and with the codec of the state that was saved
  """
  saved = _leaves_by_path(getattr(stored, "item_metadata", stored))
  if not saved:
    # A CheckpointManager that has not saved or restored knows no handler.
    raise ValueError(
      "check_stored: stored must have the leaves of a checkpoint, got none in "
      f"a {type(stored).__name__}; give Orbax's CheckpointManager "
      "item_handlers=StandardCheckpointHandler(), without which it finds no "
      "metadata before it restores"
    )
  for path, leaf in _leaves_by_path(target).items():
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
      continue
    want, found = _dtype_and_shape(leaf), "nothing"
    if path in saved:
      found = _dtype_and_shape(saved[path])
    if want != found:
      raise ValueError(
        "check_stored: target must have the dtypes and shapes that are stored, "
        f"got {want} for {found} at {path!r}; make the target of the same "
        "parameters and with the codec of the state that was saved"
      )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  # Orbax has names and places only, whatever nodes they were of.
  return {
    jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
    for keys, leaf in leaves
  }


def _dtype_and_shape(x: Any) -> str:
  return f"{np.dtype(x.dtype)}{list(x.shape)}"


def _is_foreign(x: Any) -> bool:
  """Whether a leaf has a floating dtype that NumPy itself does not have."""
  dtype = getattr(x, "dtype", None)
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
  return jax.lax.bitcast_convert_type(x, dtype)
