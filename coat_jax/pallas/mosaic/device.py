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
