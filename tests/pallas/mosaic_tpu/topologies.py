# SPDX-License-Identifier: Apache-2.0
"""Compiles programs for TPUs that are not there: libtpu describes them."""

import os

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

NAMES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(name: str, function, args, donate: tuple[int, ...] = ()):
  """Compiles a jitted function of abstract arrays for one device of a TPU."""
  # There is no metadata server to ask which TPU this is.
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
  topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
  device = topology.devices[0]
  sharding = SingleDeviceSharding(device)

  def placed(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  described = Mesh([device], ("device",)).abstract_mesh.abstract_device
  mesh = AbstractMesh((), (), abstract_device=described)
  with jax.sharding.use_abstract_mesh(mesh):
    jitted = jax.jit(function, donate_argnums=donate)
    return jitted.lower(*jax.tree.map(placed, args)).compile()
