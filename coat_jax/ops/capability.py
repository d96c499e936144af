# SPDX-License-Identifier: Apache-2.0
"""The compute capability of the NVIDIA GPU that code is traced for.

Kernels were written for Hopper, which has capability 9.0. A kernel that older
GPUs cannot run calls `why_not_before` in its `why_not`.
"""

import re

import jax

OLDEST = 8.0  # Kernels without FP8 compile for Ampere and newer GPUs.
FP8 = 8.9  # Ada is the first GPU that converts and multiplies E4M3.
HOPPER = 9.0

# All GPU tests pass on Hopper. For other GPUs, tests/aot/test_other_gpus.py
# compiles the kernels, but they have never run on these GPUs.
RUN = (HOPPER,)
COMPILED = (8.0, 8.9, 10.0, 12.0)

# If code is compiled ahead of time for an absent GPU, JAX knows only its name.
_KINDS = {
  r"A30|A100|A800": 8.0,
  r"A2|A10G?|A16|A40|RTX A\d+|RTX 30\d\d": 8.6,
  r"L4|L40S?|RTX 40\d\d|RTX \d+ Ada": 8.9,
  r"H20|H100|H200|H800|GH200": 9.0,
  r"B[12]00|GB200": 10.0,
  r"G?B300": 10.3,
  r"RTX 50\d\d|RTX PRO \d+": 12.0,
}


def capability() -> float | None:
  """Returns the capability of the GPU that code is traced for.

  Returns None if there is no NVIDIA GPU. Also returns None if the capability is
  unknown (`_KINDS` may lack the GPU); kernels then assume Hopper.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  kind = getattr(device, "device_kind", "")
  for names, found in _KINDS.items():
    if re.search(rf"\b({names})\b", kind):
      return found
  if jax.default_backend() != "gpu":
    return None
  found = str(getattr(jax.local_devices()[0], "compute_capability", ""))
  return float(found) if found[:1].isdigit() else None


def is_before(least: float) -> bool:
  """Returns whether the GPU's capability is known and below `least`."""
  found = capability()
  return found is not None and found < least


def why_not_before(least: float, what: str) -> str | None:
  """Returns why the GPU is too old for `what`, or None."""
  if not is_before(least):
    return None
  return f"{what} needs compute capability {least} or newer, got {capability()}"


def experience() -> str:
  """Returns a note in parentheses if kernels never ran at this capability."""
  found = capability()
  if found is None or found in RUN:
    return ""
  if found in COMPILED:
    return f" (compiled for compute capability {found}, never run there)"
  return f" (neither compiled for compute capability {found} nor run there)"
