# SPDX-License-Identifier: Apache-2.0
"""Leaves by shapes and paths: what is a norm or a bias, and what is encoded."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.checks import check_kind, refuse

QuantizeMask = Callable[[str, Any], bool]

_SMALLEST_LEAF, _SHORTEST_ROW = 4096, 16
# A vector this long is no bias, but many parameters in one.
_LONG_VECTOR = 1 << 20


def default_quantize_mask(path: str, leaf: Any) -> bool:
  """Whether a leaf's moments are encoded unless the user says otherwise.

  True for real leaves of at least 4096 values and 16 columns that are neither
  norms nor biases (`is_norm_or_bias`). Those stay in f32, stacked over layers
  or not: they are less than a thousandth of a model.

  Args:
    path: such as "layers/attn/qkv/kernel"; dots separate names too.
    leaf: array or `jax.ShapeDtypeStruct`.

  Returns:
    True to encode the leaf's moments.

  Raises:
    TypeError: `path` is no text or `leaf` no array.
  """
  check_leaf("default_quantize_mask", path, leaf)
  if leaf.size < _SMALLEST_LEAF or leaf.shape[-1] < _SHORTEST_ROW:
    return False
  if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    return False
  return not is_norm_or_bias(path, leaf)


def is_norm_or_bias(path: str, leaf: Any = None) -> bool:
  """Whether a leaf is a norm's parameter or a bias, by its shape and its name.

  Vectors and scalars are, whatever their names, unless they are many parameters
  in one: a tree that is nothing but a vector, as `optax.flatten` makes it, or a
  vector of a million values. Arrays of more axes may be stacked over layers:
  there the name decides.

  A name is a norm's if it *ends* in a norm, as `input_layernorm`, `q_norm` and
  `norm_1` do and `norm_mlp` does not, or is `ln` with anything, as `ln_f`; a
  bias's if `bias` is one of its words (a `b` may be anything: LoRA's `lora_b`);
  `scale`, `gamma` and `beta` belong to norms. Only the leaf's own name and the
  one above it count, and a `kernel` or an `embedding` is a matrix whatever is
  above it.

  Args:
    path: such as "layers/attn/norm/scale"; dots separate names too.
    leaf: array or `jax.ShapeDtypeStruct`; None leaves it to the name.

  Returns:
    True for norms and biases.

  Raises:
    TypeError: `path` is no text or `leaf` no array.
  """
  check_leaf("is_norm_or_bias", path, leaf)
  if path and leaf is not None and leaf.ndim < 2 and leaf.size < _LONG_VECTOR:
    return True
  names = [x for x in re.split("[/.]", path) if not x.isdigit()] or [""]
  words = _words(names[-1])
  if names[-1] in ("kernel", "embedding"):
    return False
  if "bias" in words or words[-1] in ("scale", "gamma", "beta"):
    return True
  return any(_names_norm(name) for name in names[-2:])


def check_leaf(op: str, path: Any, leaf: Any) -> None:
  """Raises a TypeError where a path is no text, or a leaf no array or None."""
  check_kind(op, "path", path, str, "pass a leaf's, as 'norm/scale'")
  if leaf is not None and not hasattr(leaf, "dtype"):
    refuse(TypeError, op, "leaf", "an array", leaf, f"pass what is at {path!r}")


def _names_norm(name: str) -> bool:
  words = [word.rstrip("0123456789") for word in _words(name)]
  words = [word for word in words if len(word) > 1] or [""]
  return words[-1].endswith(("norm", "norms")) or "ln" in (words[0], words[-1])


def _words(name: str) -> list[str]:
  return re.split("[^a-z0-9]+", name.lower())


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree with paths such as "layers/attn/qkv/kernel"."""
  out = []
  for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    leaf = jnp.asarray(leaf) if isinstance(leaf, float | complex) else leaf
    out.append((leaf_path(keys), leaf))
  return out


def leaf_path(keys: Sequence[Any]) -> str:
  """A leaf's path from its keys.

  `nnx.Variable`s end theirs in "value" where they are in the tree; that is left
  out, so that a path is the same with and without them.
  """
  if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
    keys = keys[:-1]
  return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")
