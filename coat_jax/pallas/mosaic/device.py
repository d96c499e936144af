# SPDX-License-Identifier: Apache-2.0
"""Checks that a GPU can run Mosaic kernels, and counts its multiprocessors."""

import jax

from coat_jax.ops.capability import FP8, HOPPER, capability, why_not_before


def why_not_conversions() -> str | None:
  """Returns why the GPU cannot run kernels that convert to FP8, or None."""
  return why_not_before(FP8, "a Mosaic kernel that converts to FP8")


def why_not_hopper() -> str | None:
  """Returns why the target GPU cannot run kernels for Hopper, or None.

  If the target GPU is unknown, assumes Hopper on a host without a GPU, and
  gives a reason on a host with one.
  """
  found = capability()
  is_unknown = found is None and jax.default_backend() == "gpu"
  if found in (HOPPER, None) and not is_unknown:
    return None
  return (
    f"the Mosaic kernel needs compute capability {HOPPER} (Hopper), got "
    f"{'an unknown one' if is_unknown else found}"
  )


def multiprocessors() -> int:
  """Returns the number of multiprocessors of the GPU to compile for.

  If that GPU is unknown, returns 132, as for an H100 or H200.
  """
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.num_cores:
    return described.num_cores
  if jax.default_backend() == "gpu":
    return jax.local_devices()[0].core_count
  return 132
