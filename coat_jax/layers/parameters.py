# SPDX-License-Identifier: Apache-2.0
"""How parameters are made, from initializers and metadata as flax takes them.

Metadata says, among other things, how an array is sharded: `out_sharding` has
an axis of the mesh, or a logical name, for each axis of the array. It comes
with a layer's `kernel_metadata` or with what an initializer returns
(`nnx.with_partitioning`), and tools such as `nnx.get_named_sharding` read it
off the parameter.
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

from coat_jax.checks import check_function, check_kind

type Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class NormLinearOptions(TypedDict, total=False):
  """Initializers and metadata of the parameters of a norm and a product.

  An initializer is called with a key, a shape and a dtype. The default ones of
  biases and scales draw no key. Metadata is that of `nnx.Param`.

  Attributes:
    kernel_init: of the kernel, called with the matrix [D, F] of all its
      columns; by default `nnx.Linear`'s.
    kernel_metadata: of the kernel.
    bias_init: of the product's bias; by default zeros.
    bias_metadata: of that bias.
    scale_init: of the norm's scale; by default ones.
    scale_metadata: of that scale.
    norm_bias_init: of the norm's bias; by default zeros.
    norm_bias_metadata: of that bias.
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

  With those of `NormLinearOptions`, which are of the norms and of the first
  product.

  Attributes:
    out_kernel_init: of the second product's kernel; by default `kernel_init`.
    out_kernel_metadata: of that kernel; by default `kernel_metadata`.
    out_bias_init: of the second product's bias; by default `bias_init`.
    out_bias_metadata: of that bias; by default `bias_metadata`.
  """

  out_kernel_init: nnx.Initializer | None
  out_kernel_metadata: Metadata
  out_bias_init: nnx.Initializer | None
  out_bias_metadata: Metadata


class OptionsByPart(NamedTuple):
  """Options as the constructors of a block's modules take them.

  Attributes:
    norm: of the norm.
    front: of the first `Linear`.
    norm_linear: of a `NormLinear`, which has both.
    back: of the second `Linear`.
    others: what none of them takes.
  """

  norm: dict[str, Any]
  front: dict[str, Any]
  norm_linear: dict[str, Any]
  back: dict[str, Any]
  others: dict[str, Any]


def options_by_part(
  options: Mapping[str, Any], kind: Any = BlockOptions
) -> OptionsByPart:
  """Splits options of a kind; those that are None or empty are left out."""
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
  """A parameter with its metadata, sharded by it on the mesh that is set.

  Args:
    init: called with a key of the stream `params`, a shape and a dtype; None
      for `default`, which gets no key.
    rngs: has the stream.
    shape: of the parameter.
    dtype: of the parameter.
    metadata: of `nnx.Param`; what the initializer returns wins, as in flax.
    default: called with a shape and a dtype.
    drawn: the shape that the initializer is called with; None for `shape`.

  Raises:
    TypeError: `init` is no function, or `metadata` no mapping.
    ValueError: more axes are named than there are.
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
  """Arguments of a `Linear` [D, F] for the one of several, [D, several, F].

  Sharding that names the axes of one leaves the axis between unsplit.
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
  """What each axis is split over, where metadata says so by names."""
  names = metadata.get("out_sharding")
  return tuple(names) if isinstance(names, tuple | list | P) else ()


def _boxed(value: Any) -> nnx.VariableMetadata:
  """What an initializer returned, with the metadata of flax's boxes."""
  if isinstance(value, nnx.VariableMetadata):
    return value
  if isinstance(value, Partitioned):
    # Of linen.with_partitioning, in a module behind nnx.bridge. As in Linen, it
    # is a name for those who ask for it, and needs no mesh.
    metadata = value.to_nnx_metadata()
    metadata |= dict(linen_meta_type=type(value), eager_sharding=False)
    return nnx.VariableMetadata(metadata.pop("value"), metadata=metadata)
  return nnx.VariableMetadata(value)
