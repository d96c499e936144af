# SPDX-License-Identifier: Apache-2.0
"""Makes parameters from initializers and metadata, as flax does.

`out_sharding` in the metadata names a mesh axis or a logical axis for each
dimension of an array. A layer gets metadata from an argument such as
`kernel_metadata`, or from an initializer (with `nnx.with_partitioning`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core.meta import Partitioned
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax.numerics.checks import check_function, check_kind

type Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


def make_param(
  init: nnx.Initializer | None,
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  dtype: DTypeLike,
  metadata: Metadata,
  *,
  default: Callable[..., Array] = jnp.zeros,
  drawn: tuple[int, ...] | None = None,
) -> nnx.Param:
  """Makes a parameter, sharded on the current mesh according to its metadata.

  `init` is called with the shape `drawn` (default: `shape`). If `init` is None,
  `default` makes the array without a PRNG key. As in flax, an initializer's
  metadata overrides `metadata`.
  """
  op, remedy = "parameters", "pass one, as in dict(out_sharding=...)"
  check_kind(op, "metadata", metadata, Mapping, remedy)
  if init is not None:
    remedy = "pass one of nnx.initializers, or None"
    check_function(op, "an initializer", init, remedy)
  if init is None:
    value = _boxed(default(shape, dtype))
  else:
    value = _boxed(init(rngs.params(), drawn or shape, dtype))
  names = _names({**metadata, **value.metadata})
  if len(names) > len(shape):
    raise ValueError(
      "metadata: out_sharding must have at most one entry for each axis, got "
      f"{names} for a parameter of shape {shape}; leave out some"
    )
  array = value.raw_value.reshape(shape)
  return nnx.Param(dataclasses.replace(value, raw_value=array), **metadata)


def stack_options(options: Mapping[str, Any]) -> dict[str, Any]:
  """Converts options for a kernel [D, F] to options for [D, 2, F].

  A sharding for [D, F] is kept, and the new axis is not split.
  """
  out = dict(options)
  for name, axis in (("kernel", 1), ("bias", 0)):
    metadata, init = f"{name}_metadata", f"{name}_init"
    out[metadata] = _stack_names(out.get(metadata, NO_METADATA), axis)
    if out.get(init) is not None:
      out[init] = functools.partial(_stacked, out[init], axis)
  return out


def _stacked(init, axis, *args):
  value = _boxed(init(*args))
  return dataclasses.replace(value, metadata=_stack_names(value.metadata, axis))


def _stack_names(metadata: Metadata, axis: int) -> dict[str, Any]:
  names = _names(metadata)
  if len(names) != axis + 1:
    return dict(metadata)
  return dict(metadata, out_sharding=(*names[:axis], None, *names[axis:]))


def _names(metadata: Metadata) -> tuple[Any, ...]:
  """Returns the names in the metadata's `out_sharding`."""
  names = metadata.get("out_sharding")
  return tuple(names) if isinstance(names, tuple | list | P) else ()


def _boxed(value: Any) -> nnx.VariableMetadata:
  """Wraps an initializer's result; keeps the metadata if flax boxed it."""
  if isinstance(value, nnx.VariableMetadata):
    return value
  if isinstance(value, Partitioned):
    # Under `nnx.bridge`, `linen.with_partitioning` boxes the value. Axis names
    # are then allowed without a mesh, as in Linen.
    metadata = value.to_nnx_metadata()
    metadata |= dict(linen_meta_type=type(value), eager_sharding=False)
    return nnx.VariableMetadata(metadata.pop("value"), metadata=metadata)
  return nnx.VariableMetadata(value)
