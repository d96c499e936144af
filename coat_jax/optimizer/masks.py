# SPDX-License-Identifier: Apache-2.0
"""Decides by a leaf's path and shape whether its moments are encoded."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.codecs.group import Encoded, Plain
from coat_jax.numerics.checks import check_kind, refuse

QuantizeMask = Callable[[str, Any], bool]

_PLAIN = {dtype: Plain(dtype) for dtype in ("float32", "complex64")}

_SMALLEST_LEAF, _SHORTEST_ROW = 4096, 16
# A vector of this length or more is not a bias, but a flattened tree.
_LONG_VECTOR = 1 << 20


def plain_codec(is_complex: bool) -> Plain:
  """Returns the codec that stores a leaf unencoded, in f32 or complex64."""
  return _PLAIN["complex64" if is_complex else "float32"]


def is_encoded(encoded: Encoded) -> bool:
  """Returns whether a leaf was encoded, and not stored by `plain_codec`."""
  return encoded.codes.dtype.name not in _PLAIN


def default_quantize_mask(path: str, leaf: Any) -> bool:
  """Returns whether a leaf's moments are encoded by default.

  A leaf is encoded if it is real, has at least 4096 values and 16 columns, and
  is not a norm or a bias. All other leaves together are usually less than 0.1 %
  of a model's parameters.

  Args:
    path: for example "layers/attn/qkv/kernel"; dots separate names too.
    leaf: array or `jax.ShapeDtypeStruct`.

  Raises:
    TypeError: `path` is not a string, or `leaf` is not an array.
  """
  check_leaf("default_quantize_mask", path, leaf)
  if leaf.size < _SMALLEST_LEAF or leaf.shape[-1] < _SHORTEST_ROW:
    return False
  if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    return False
  return not is_norm_or_bias(path, leaf)


def is_norm_or_bias(path: str, leaf: Any = None) -> bool:
  """Decides by shape and name whether a leaf is a norm's parameter or a bias.

  Vectors and scalars count as norms or biases. The name decides instead for
  arrays with more axes (which may be stacked norms), for vectors of over a
  million values, and for a vector that is the whole tree (`optax.flatten`):

  - A `kernel` or an `embedding` is neither.
  - A bias's name contains the word `bias`.
  - A norm's name ends in `norm` (`input_layernorm`, `q_norm` or `norm_1`, but
    not `norm_mlp`), begins or ends with the word `ln` (`ln_f`), or ends with
    the word `scale`, `gamma` or `beta`. For `norm` and `ln`, the name of the
    leaf's parent counts too.

  Args:
    path: for example "layers/attn/norm/scale"; dots separate names too.
    leaf: array or `jax.ShapeDtypeStruct`; None to decide by the name alone.

  Raises:
    TypeError: `path` is not a string, or `leaf` is not an array.
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
  """Raises a TypeError if `path` is not a string or `leaf` is not an array."""
  check_kind(op, "path", path, str, "pass a leaf's path, such as 'norm/scale'")
  if leaf is not None and not hasattr(leaf, "dtype"):
    refuse(TypeError, op, "leaf", "an array", leaf, f"pass what is at {path!r}")


def _names_norm(name: str) -> bool:
  words = [word.rstrip("0123456789") for word in _words(name)]
  words = [word for word in words if len(word) > 1] or [""]
  return words[-1].endswith(("norm", "norms")) or "ln" in (words[0], words[-1])


def _words(name: str) -> list[str]:
  return re.split("[^a-z0-9]+", name.lower())


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
  """Lists leaves with paths like "mlp/kernel"; turns floats into arrays."""
  out = []
  for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    leaf = jnp.asarray(leaf) if isinstance(leaf, float | complex) else leaf
    out.append((leaf_path(keys), leaf))
  return out


def in_order(paths: Sequence[str], named: list[tuple[str, Any]]) -> list[Any]:
  """Returns the values of `named`, (path, value) pairs, sorted like `paths`.

  Leaves with equal paths, such as "a/b" in {"a/b": x, "a": {"b": y}}, keep
  their order.
  """
  places = sorted(range(len(paths)), key=paths.__getitem__)
  values = sorted(named, key=lambda pair: pair[0])
  found = {i: x for i, (_, x) in zip(places, values, strict=True)}
  return [found[i] for i in range(len(paths))]


def leaf_path(keys: Sequence[Any]) -> str:
  """Joins a leaf's keys to a path; drops the "value" of an `nnx.Variable`."""
  if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
    keys = keys[:-1]
  return node_path(keys)


def node_path(keys: Sequence[Any]) -> str:
  """Joins the keys of any node of a tree to a path such as "0/mu"."""
  return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")
