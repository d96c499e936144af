# SPDX-License-Identifier: Apache-2.0
"""Encodes the zeros with which moments start."""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, P, core, lax
from jax.sharding import Mesh, NamedSharding, Sharding

from coat_jax import mesh as meshes
from coat_jax.codecs import Encoded
from coat_jax.codecs.factored import Factored
from coat_jax.codecs.group import GroupCodec


def encode_zeros(group: GroupCodec, leaf: Any) -> Encoded:
  """Encodes zeros with the shape and sharding of a leaf.

  To encode a whole model's zeros, XLA would spend half a minute on constant
  folding, or use gigabytes at run time. All groups of zeros have the same codes
  and statistics, so we encode one group and repeat the result.
  """
  shape = jnp.shape(leaf)
  n = shape[-1] if shape else 1
  # Without a group size, codes may depend on the column, so encode a whole row.
  size = max(1, min(n, getattr(group, "group_size", n)))
  # The sample is one group, and the short group that ends a row, if any.
  sample = (*(1 for _ in shape[:-1]), min(n, size + n % size)) if shape else ()
  sharding = None
  if not isinstance(leaf, core.Tracer) and getattr(leaf, "committed", True):
    sharding = getattr(leaf, "sharding", None)
  with _mesh_for(sharding):
    zeros = jnp.full_like(leaf, 0, jnp.float32, sample)
    spec = meshes.spec_of(leaf)
    return _encode_zeros(group, zeros, shape, size, spec, sharding)


def _mesh_for(sharding: Sharding | None) -> AbstractContextManager[Any]:
  """Returns a context that sets a concrete leaf's mesh, if necessary.

  This is necessary if the leaf is sharded on explicit axes and no mesh is set.
  But JAX cannot set a mesh while it traces a function. Zeros that are made
  during tracing are therefore not sharded, like those of `jnp.zeros_like`.
  """
  where = getattr(sharding, "mesh", None)
  is_explicit = isinstance(where, Mesh) and where.abstract_mesh.explicit_axes
  is_set = not jax.sharding.get_abstract_mesh().empty
  is_traced = isinstance(jnp.zeros(()), core.Tracer)
  if not is_explicit or is_set or is_traced:
    return contextlib.nullcontext()
  return jax.set_mesh(where)


@functools.partial(
  jax.jit,
  static_argnames=("group", "shape", "size", "spec", "sharding"),
  inline=True,
)
def _encode_zeros(
  group: GroupCodec,
  zeros: Array,
  shape: tuple[int, ...],
  size: int,
  spec: P,
  sharding: Sharding | None,
) -> Encoded:
  """Encodes the sample `zeros`, and repeats its first group to fill a leaf."""
  count = shape[-1] // size if shape else 1

  def repeated(x, width):
    """Repeats the first `width` columns."""
    if not x.ndim:
      return x
    groups = jnp.tile(x[..., :width], count)
    row = jnp.concatenate([groups, x[..., width:]], axis=-1)
    return jnp.broadcast_to(row, (*shape[:-1], row.shape[-1]))

  def f(zeros):
    if isinstance(group, Factored):
      return group.zeros(shape)
    noise = jnp.full_like(zeros, 0.5) if group.needs_noise else None
    codes, amax, range_ = group.encode(zeros, noise)
    return Encoded(
      repeated(codes, size), repeated(amax, 1), repeated(range_, 1)
    )

  out = meshes.run_whole(f, zeros, out_specs=spec)
  return jax.tree.map(functools.partial(_placed, sharding=sharding), out)


def _placed(x: Array, sharding: Sharding | None) -> Array:
  """Shards an array like the concrete leaf that it belongs to."""
  if isinstance(sharding, NamedSharding):
    where = sharding.mesh.abstract_mesh
    if where.explicit_axes:
      return x  # Its type contains the sharding.
    with jax.sharding.use_abstract_mesh(where):
      spec = meshes.fitted(sharding.spec, x.shape)
    sharding = NamedSharding(sharding.mesh, spec)
  return x if sharding is None else lax.with_sharding_constraint(x, sharding)
