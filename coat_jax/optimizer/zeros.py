# SPDX-License-Identifier: Apache-2.0
"""Encodes the zeros that a state begins with, without computing whole leaves.

XLA would need half a minute to fold the encoding of a model's zeros, and
gigabytes to compute it. All groups of zeros have the same codes and statistics,
so `encode_zeros` encodes one group and repeats it.
"""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, P, core, lax
from jax.sharding import Mesh, NamedSharding, Sharding

from coat_jax import mesh
from coat_jax.codecs.group import Encoded, GroupCodec


def encode_zeros(group: GroupCodec, leaf: Any) -> Encoded:
  """Encodes zeros with the shape and the sharding of a leaf, under noise 0.5.

  Statistics are sharded like the leaf, except along axes that they cannot
  divide evenly.
  """
  shape = jnp.shape(leaf)
  n = shape[-1] if shape else 1
  # Without a group size, a code may depend on its column.
  size = max(1, min(n, getattr(group, "group_size", n)))
  # One group, and the short group that ends a row.
  sample = (*(1 for _ in shape[:-1]), min(n, size + n % size)) if shape else ()
  sharding = _sharding_of(leaf)
  with _mesh_for(sharding):
    zeros = jnp.full_like(leaf, 0, jnp.float32, sample)
    spec = mesh.spec_of(leaf)
    return _encode_zeros(group, zeros, shape, size, spec, sharding)


def _sharding_of(leaf: Any) -> Sharding | None:
  """Returns a leaf's sharding if it is a concrete array's, or None."""
  if isinstance(leaf, core.Tracer) or not getattr(leaf, "committed", True):
    return None
  return getattr(leaf, "sharding", None)


def _mesh_for(sharding: Sharding | None) -> AbstractContextManager[Any]:
  """Sets the mesh of a concrete leaf on explicit axes, unless one is set.

  JAX cannot set a mesh while it traces a function. Without one, the result is
  not sharded, as that of `jnp.zeros_like`.
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
  """Encodes the sample `zeros` and repeats its first group to a leaf."""
  count = shape[-1] // size if shape else 1

  def repeated(x, width):
    """Repeats the first `width` columns."""
    if not x.ndim:
      return x
    groups = jnp.tile(x[..., :width], count)
    row = jnp.concatenate([groups, x[..., width:]], axis=-1)
    return jnp.broadcast_to(row, (*shape[:-1], row.shape[-1]))

  def f(zeros):
    noise = jnp.full_like(zeros, 0.5) if group.needs_noise else None
    codes, amax, range_ = group.encode(zeros, noise)
    return Encoded(
      repeated(codes, size), repeated(amax, 1), repeated(range_, 1)
    )

  out = mesh.run_whole(f, zeros, out_specs=spec)
  return jax.tree.map(functools.partial(_placed, sharding=sharding), out)


def _placed(x: Array, sharding: Sharding | None) -> Array:
  """Shards an array like the concrete leaf that it belongs to, on any mesh."""
  if isinstance(sharding, NamedSharding):
    where = sharding.mesh.abstract_mesh
    if where.explicit_axes:
      return x  # Its type has the sharding.
    with jax.sharding.use_abstract_mesh(where):
      spec = mesh.fitted(sharding.spec, x.shape)
    sharding = NamedSharding(sharding.mesh, spec)
  return x if sharding is None else lax.with_sharding_constraint(x, sharding)
