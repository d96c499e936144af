# SPDX-License-Identifier: Apache-2.0
"""Making parameters from initializers and metadata like flax's.

Metadata includes how an array is sharded: `out_sharding` has an axis of the
mesh, or a logical name, for each axis of the array. It comes with a layer's
`kernel_metadata` or with what an initializer returns (`nnx.with_partitioning`),
and tools such as `nnx.get_named_sharding` read it off the parameter.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import jax.numpy as jnp
from flax import nnx
from flax.core.meta import Partitioned
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax.numerics.checks import check_function, check_kind

type Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class NormLinearOptions(TypedDict, total=False):
  """Initializers and metadata of the parameters of a norm and a product.

  An initializer is called with a key, a shape and a dtype; metadata is passed
  to `nnx.Param`. Biases start as zeros and scales as ones, without a key,
  unless their initializer is given.

  Attributes:
    kernel_init: initializer of the kernel, called with the matrix shape [D, F]
      of all its columns; by default `nnx.Linear`'s.
    kernel_metadata: metadata of the kernel.
    bias_init, bias_metadata: initializer and metadata of the product's bias.
    scale_init, scale_metadata: initializer and metadata of the norm's scale.
    norm_bias_init, norm_bias_metadata: initializer and metadata of the norm's
      bias.
  """

  kernel_init: nnx.Initializer | None
  kernel_metadata: Metadata
  bias_init: nnx.Initializer | None
  bias_metadata: Metadata
  scale_init: nnx.Initializer | None
  scale_metadata: Metadata
  norm_bias_init: nnx.Initializer | None
  norm_bias_metadata: Metadata


class BlockOptions(NormLinearOptions, total=False):
  """Initializers and metadata of the parameters of a block.

  The options of `NormLinearOptions` apply to the norms and the first product.

  Attributes:
    out_kernel_init, out_kernel_metadata: initializer and metadata of the second
      product's kernel; by default the first product's.
    out_bias_init, out_bias_metadata: initializer and metadata of the second
      product's bias; by default the first product's.
  """

  out_kernel_init: nnx.Initializer | None
  out_kernel_metadata: Metadata
  out_bias_init: nnx.Initializer | None
  out_bias_metadata: Metadata


class OptionsByPart(NamedTuple):
  """Options for the constructors of a block's modules."""

  norm: dict[str, Any]
  front: dict[str, Any]
  norm_linear: dict[str, Any]
  back: dict[str, Any]
  others: dict[str, Any]


def options_by_part(
  options: Mapping[str, Any], kind: Any = BlockOptions
) -> OptionsByPart:
  """Splits options by module; omits options that are None or empty."""
  known = kind.__annotations__
  given = {name: options[name] for name in known if options.get(name)}

  def part(*names, prefix=""):
    return {n: given[prefix + n] for n in names if prefix + n in given}

  linear = ("kernel_init", "kernel_metadata", "bias_init", "bias_metadata")
  front = part(*linear)
  scale = part("scale_init", "scale_metadata")
  return OptionsByPart(
    norm=scale | part("bias_init", "bias_metadata", prefix="norm_"),
    front=front,
    norm_linear={n: v for n, v in given.items() if not n.startswith("out_")},
    back=front | part(*linear, prefix="out_"),
    others={n: v for n, v in options.items() if n not in known},
  )


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
  """Makes a parameter with its metadata, sharded by it on the current mesh.

  `init` is called with a key from the stream `params`, the shape `drawn` (or
  `shape`) and a dtype; without one, `default` gets a shape and a dtype, and no
  key. As in flax, metadata that the initializer returns takes precedence.
  """
  op = "parameters"
  check_kind(
    op, "metadata", metadata, Mapping, "pass one, as in dict(out_sharding=...)"
  )
  if init is not None:
    remedy = "pass one of nnx.initializers, or None"
    check_function(op, "an initializer", init, remedy)
  drawn = drawn or shape
  if init is None:
    value = _boxed(default(drawn, dtype))
  else:
    value = _boxed(init(rngs.params(), drawn, dtype))
  names = _names({**metadata, **value.metadata})
  if len(names) > len(shape):
    raise ValueError(
      "metadata: out_sharding must have one entry for each axis at most, got "
      f"{names} for a parameter {shape}; name those of the kernel"
    )
  array = value.raw_value.reshape(shape)
  return nnx.Param(dataclasses.replace(value, raw_value=array), **metadata)


def stack_options(options: Mapping[str, Any]) -> dict[str, Any]:
  """Converts options of a `Linear` [D, F] for several, [D, several, F].

  If sharding names the axes of one layer, the new axis stays unsplit.
  """
  out = dict(options)
  for name, axis in (("kernel", 1), ("bias", 0)):
    metadata, init = f"{name}_metadata", f"{name}_init"
    if metadata in out:
      out[metadata] = _stack_names(out[metadata], axis)
    if init in out:
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
  """Returns the name that splits each axis, if metadata has names."""
  names = metadata.get("out_sharding")
  return tuple(names) if isinstance(names, tuple | list | P) else ()


def _boxed(value: Any) -> nnx.VariableMetadata:
  """Wraps what an initializer returned, with the metadata of flax's boxes."""
  if isinstance(value, nnx.VariableMetadata):
    return value
  if isinstance(value, Partitioned):
    # From linen.with_partitioning, in a module through nnx.bridge. As in Linen,
    # it is only a name to look up and needs no mesh.
    metadata = value.to_nnx_metadata()
    metadata |= dict(linen_meta_type=type(value), eager_sharding=False)
    return nnx.VariableMetadata(metadata.pop("value"), metadata=metadata)
  return nnx.VariableMetadata(value)
