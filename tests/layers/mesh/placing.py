# SPDX-License-Identifier: Apache-2.0
"""Shards arrays over meshes, and counts the bytes that a device holds."""

import jax
from jax import P
from jax.sharding import NamedSharding


def normal(shapes):
  keys = jax.random.split(jax.random.key(1), len(shapes))
  return tuple(map(jax.random.normal, keys, shapes))


def place(mesh, spec, tree):
  def put(path, x):
    entries = spec(path, x)
    # Array types have one entry per axis, so a shorter spec would be a
    # different type, for which JAX compiles again.
    entries = P(*entries, *(None,) * (x.ndim - len(entries)))
    return jax.device_put(x, NamedSharding(mesh, entries))

  return jax.tree.map_with_path(put, tree)


def assert_sharded_like(found, wanted):
  """Checks that shardings and bytes per device match, leaf by leaf."""
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b)
    assert bytes_of_device(a) == bytes_of_device(b)


def bytes_of_device(x):
  return x.addressable_shards[0].data.nbytes
