# SPDX-License-Identifier: Apache-2.0
"""One operation, its definition and the backends that can run it.

An `Op` is called as its definition is, with `implementation` beside:

  None     for a GPU the kernel where it can take these arguments, else "xla"
  "xla"    the definition
  another  this one, or NotImplementedError with the reason why not

`explain` says which it would be, and why. Nothing else depends on the platform.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from coat_jax.ops.types import Implementation

type Kernels = tuple[tuple[Implementation, str], ...]


@dataclasses.dataclass(frozen=True)
class Op[R]:
  """An operation with all who can carry it out.

  Attributes:
    definition: in plain jnp, and what the signature is.
    check: raises for arguments that no implementation can take, or None.
    kernels: pairs of an implementation's name and its module; the first that
      can take the arguments is what a GPU runs.
  """

  definition: Callable[..., R]
  kernels: Kernels = ()
  check: Callable[..., None] | None = None

  @property
  def name(self) -> str:
    return self.definition.__name__

  @property
  def implementations(self) -> tuple[Implementation, ...]:
    """Names that `implementation` can have."""
    return ("xla", *(name for name, _ in self.kernels))

  def __call__(
    self, *args: Any, implementation: Implementation | None = None, **kwargs
  ) -> R:
    if self.check is not None:
      self.check(*args, **kwargs)
    if implementation is None:
      return self._choose(args, kwargs)
    if implementation == "xla":
      return self.definition(*args, **kwargs)
    module = dict(self.kernels).get(implementation)
    if module is None:
      raise NotImplementedError(
        f"{self.name}: implementation must be one of {self.implementations}, "
        f"got {implementation!r}"
      )
    reason = self._unsupported(implementation, module, args, kwargs)
    if reason is not None:
      raise NotImplementedError(
        f"{reason}; pass implementation=None to have XLA do it there"
      )
    return self._kernel(implementation, module)(*args, **kwargs)

  def _choose(self, args, kwargs) -> R:
    """The kernel where this is compiled for a GPU, if there is one."""
    for name, module in self.kernels if _targets_gpu() else ():
      if self._unsupported(name, module, args, kwargs) is None:
        if _is_on_mesh():
          return self._kernel(name, module)(*args, **kwargs)
        # Once more when it is lowered: on a machine with a GPU a computation
        # can be put on the CPU.
        return jax.lax.platform_dependent(
          *args,
          cuda=functools.partial(self._kernel(name, module), **kwargs),
          default=functools.partial(self.definition, **kwargs),
        )
    return self.definition(*args, **kwargs)

  def explain(self, *args: Any, **kwargs) -> str:
    """See `ops.explain`."""
    reasons = []
    for name, module in self.kernels:
      reason = self._unsupported(name, module, args, kwargs)
      if reason is None:
        return f"{self.name}: {name} on a GPU, xla elsewhere"
      reasons.append(reason)
    reasons = reasons or ["there is no kernel for it"]
    return f"{self.name}: xla everywhere ({'; '.join(reasons)})"

  def _kernel(self, implementation: str, module: str) -> Callable[..., R]:
    return getattr(_module(implementation, module), self.name)

  def _unsupported(
    self, implementation: str, module: str, args, kwargs
  ) -> str | None:
    if implementation in ("triton", "mosaic") and _may_be_partitioned():
      return (
        f"{self.name}: with several GPUs a kernel sees one device's part only "
        "inside jax.shard_map"
      )
    unsupported = f"{self.name}_unsupported"
    return getattr(_module(implementation, module), unsupported)(
      *args, **kwargs
    )


def explain(op: Op, *args: Any, **kwargs) -> str:
  """Says which implementation of an op these arguments get, and why.

  Args:
    op: such as `ops.norm_fwd`.
    *args, **kwargs: what it would be called with; traced arrays do too.

  Returns:
    One sentence, as "quantize_groups: triton on a GPU, xla elsewhere".
  """
  return op.explain(*args, **kwargs)


def op(
  check: Callable[..., None] | None = None, **kernels: str
) -> Callable[[Callable[..., Any]], Op]:
  """Makes an `Op` of its definition: `@op(triton="norm")`.

  Args:
    check: raises for arguments that no implementation can take, or None.
    **kernels: by backend, the module that has a function of the same name.
  """

  def make(definition: Callable[..., Any]) -> Op:
    return Op(definition, tuple(kernels.items()), check)  # pyright: ignore[reportArgumentType]

  return make


def _module(implementation: str, name: str):
  """A module with kernels, imported when first needed."""
  folder = {"triton": "pallas.triton", "mosaic": "pallas.mosaic"}
  room = folder.get(implementation, "ops")
  return importlib.import_module(f"coat_jax.{room}.{name}")


def _is_on_mesh() -> bool:
  """Whether this runs on the devices of a mesh, inside shard_map, and no other.

  XLA keeps a choice of platform that has a collective in it as a conditional,
  and the host then waits for the device at each. What is traced without the
  choice lowers for the mesh's platform only.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and mesh.abstract_device is not None


def _targets_gpu() -> bool:
  """Whether what is traced now is for a GPU with FP8, as far as one can say."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  # A mesh's devices say gpu.
  if device is not None and device.platform not in ("cuda", "gpu"):
    return False
  if jax.default_backend() != "gpu":
    return device is not None  # It is compiled here for a mesh elsewhere.
  # Ada has FP8 as well; GPUs before it have not. AMD's name no number.
  capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
  return capability[:1].isdigit() and float(capability) >= 8.9


def _may_be_partitioned() -> bool:
  """Whether XLA may gather arrays for a kernel, which it cannot partition."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.auto_axes or mesh.explicit_axes:
    return mesh.size > 1
  # No mesh is set, or all of its axes are manual: inside shard_map.
  return not mesh.manual_axes and _may_run_on_several_gpus()


def _may_run_on_several_gpus() -> bool:
  return jax.default_backend() == "gpu" and jax.device_count() > 1
