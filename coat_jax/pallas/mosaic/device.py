# SPDX-License-Identifier: Apache-2.0
"""Checks that the GPU is one that kernels of Mosaic are written for."""

import jax


def why_not() -> str | None:
  """Returns why kernels cannot run on this GPU; None without a GPU."""
  if jax.default_backend() != "gpu":
    return None
  device = jax.local_devices()[0]
  capability = getattr(device, "compute_capability", "an unknown one")
  if capability == "9.0":
    return None
  return (
    "the kernel of Mosaic is for Hopper, of compute capability 9.0, got "
    f"{capability}"
  )


def multiprocessors() -> int:
  """Returns how many the GPU that code is traced for has."""
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.num_cores:
    return described.num_cores
  if jax.default_backend() == "gpu":
    return jax.local_devices()[0].core_count
  return 132
