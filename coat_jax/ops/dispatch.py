# SPDX-License-Identifier: Apache-2.0
"""Dispatches each operation to one of its implementations.

A call passes the arguments of the operation's definition, and `implementation`:

  None          runs the first kernel for this GPU or TPU that supports these
                arguments; if there is none, runs the definition
  "xla"         runs the definition
  another name  runs that kernel; raises `Unsupported` if the kernel does not
                support these arguments

`explain` reports which implementation would run, and why.

To add your implementation, set `op.kernels["name"] = function`. The function
needs the definition's signature. If the function does not support all
arguments, decorate it with `@kernel(why_not)`.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jax

from coat_jax.numerics.checks import (
  check_choice,
  check_function,
  check_kind,
  refuse,
)
from coat_jax.numerics.scaling import Layout
from coat_jax.numerics.varying import varying
from coat_jax.ops.capability import (
  OLDEST,
  capability,
  experience,
  why_not_before,
)
from coat_jax.ops.types import Unsupported

# An implementation, or the name of a module that contains a function with the
# operation's name. The module is imported when it is first needed.
type Kernel = str | Callable[..., Any]

# XLA can partition these implementations, because they are written in jnp, or
# because JAX defines how to partition them.
_PARTITIONED = ("cublas", "cudnn", "cuda")

# Kernels that are not listed here are for NVIDIA GPUs.
_PLATFORMS = {"mosaic_tpu": "tpu"}
_DEVICES = {"cuda": "a GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True, eq=False)
class Op[R]:
  """An operation with its implementations.

  Attributes:
    definition: the operation in plain jnp; determines the signature.
    kernels: maps an implementation's name to its kernel. The first kernel that
      supports the platform and the arguments runs. You may add kernels.
    check: a function that raises for arguments that no implementation supports,
      or None.
  """

  definition: Callable[..., R]
  kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)
  check: Callable[..., None] | None = None

  def __post_init__(self):
    remedy = "pass the function in plain jnp"
    check_function("Op", "definition", self.definition, remedy)

  @property
  def name(self) -> str:
    return self.definition.__name__

  @property
  def implementations(self) -> tuple[str, ...]:
    """The names that `implementation` accepts."""
    return ("xla", *self.kernels)

  def require_known(self, implementation: Any, op: str = "") -> None:
    """Raises NotImplementedError for `op` if `implementation` is unknown."""
    if implementation not in (None, *self.implementations):
      raise NotImplementedError(
        f"{op or self.name}: implementation must be one of "
        f"{self.implementations}, got {implementation!r}; leave it out for the "
        "default"
      )

  def kernel(self, implementation: str) -> Callable[..., R]:
    """Returns the function for any name in `implementations` except "xla"."""
    found = self.kernels[implementation]
    if not isinstance(found, str):
      return found
    is_in_ops = implementation in _PARTITIONED
    folder = "ops" if is_in_ops else f"pallas.{implementation}"
    module = importlib.import_module(f"coat_jax.{folder}.{found}")
    return getattr(module, self.name)

  def __call__(
    self, *args: Any, implementation: str | None = None, **kwargs
  ) -> R:
    self.require_known(implementation)
    self.check_call(args, kwargs)
    # Inside shard_map, let all arguments vary over the same mesh axes.
    args, kwargs = varying((args, kwargs))
    if implementation is None:
      return self._choose(args, kwargs)
    if implementation == "xla":
      return self.definition(*args, **kwargs)
    reason = self.why_not(implementation, args, kwargs)
    if reason is not None:
      raise Unsupported(f"{reason}; pass implementation=None for the default")
    return self.kernel(implementation)(*args, **kwargs)

  def check_call(self, args, kwargs) -> None:
    """Raises for arguments that no implementation supports."""
    for x in jax.tree.leaves(args):
      if not hasattr(x, "dtype"):
        remedy = "pass options by keyword"
        refuse(TypeError, self.name, "arguments", "arrays", x, remedy)
    if "layout" in kwargs:
      layouts = get_args(Layout)
      check_choice(self.name, "layout", kwargs["layout"], layouts)
    if self.check is not None:
      self.check(*args, **kwargs)

  def _choose(self, args, kwargs) -> R:
    """Runs the first kernel that supports the call, else the definition."""
    platform = target()
    for name in self.kernels:
      if _platform_of(name) != platform:
        continue
      if self.why_not(name, args, kwargs):
        continue
      kernel = functools.partial(self.kernel(name), **kwargs)
      if _is_on_mesh():
        return kernel(*args)
      # Choose again at lowering, because a machine with a GPU can also run the
      # traced code on its CPU.
      default = functools.partial(self.definition, **kwargs)
      return jax.lax.platform_dependent(
        *args,
        default=default,
        **{platform: kernel},  # pyright: ignore[reportCallIssue]
      )
    return self.definition(*args, **kwargs)

  def why_not(self, implementation: str, args, kwargs) -> str | None:
    """Returns why an implementation rejects these arguments, or None."""
    if implementation not in _PARTITIONED and may_be_partitioned():
      return (
        f"{self.name}: with several devices, {implementation} can run only "
        "inside jax.shard_map, which layers use if recipe.axes is given, and "
        "optimizers if shardings are given and split no groups or tiles"
      )
    if _platform_of(implementation) == "cuda":
      reason = why_not_before(OLDEST, "a kernel")
      if reason is not None:
        return f"{self.name}: {reason}"
    why_not = getattr(self.kernel(implementation), "why_not", None)
    reason = why_not and why_not(*args, **kwargs)
    return reason and f"{self.name}: {reason}"


def explain(op: Op, *args: Any, **kwargs) -> str:
  """Tells which implementation an op runs for these arguments.

  Args:
    op: an operation, such as `ops.norm_fwd`.
    *args, **kwargs: the arguments of the call. Traced arrays and
      `jax.ShapeDtypeStruct`s work too.

  Returns:
    One line, such as "quantize_groups: mosaic on a GPU, xla elsewhere". If no
    kernel for GPUs can run, the reasons follow. If the GPU is known not to be a
    Hopper GPU, the line adds that the kernel has never run on such a GPU.

  Raises:
    TypeError: `op` is not an `Op`.
    TypeError, ValueError: the operation's checks refuse the arguments.
  """
  check_kind("explain", "op", op, Op, "pass one of coat_jax.ops")
  op.check_call(args, kwargs)
  chosen: dict[str, str] = {}
  reasons: list[str] = []
  for name in op.kernels:
    platform = _platform_of(name)
    reason = op.why_not(name, args, kwargs)
    if reason is None:
      chosen.setdefault(platform, f"{name} on {_DEVICES[platform]}")
    else:
      reasons.append(reason)
  where = ", ".join([*chosen.values(), "xla elsewhere"])
  if "cuda" in chosen:
    return f"{op.name}: {where}{experience()}"
  where = where if chosen else "xla everywhere"
  # Several kernels may have the same reason.
  why = list(dict.fromkeys(reasons)) or ["there is no kernel for it"]
  return f"{op.name}: {where} ({'; '.join(why)})"


def op[R](
  check: Callable[..., None] | None = None, **kernels: Kernel
) -> Callable[[Callable[..., R]], Op[R]]:
  """Returns a decorator that makes a definition an `Op`: `@op(mosaic="norm")`.

  Each keyword names an implementation and passes its `Kernel`. The modules of
  `cublas` and `cudnn` are in `ops`, others in `pallas.<implementation>`.
  """

  def make(definition: Callable[..., R]) -> Op[R]:
    return Op(definition, kernels, check)

  return make


def kernel[**P, R](
  why_not: Callable[..., str | None],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Makes an implementation raise `Unsupported` if `why_not` gives a reason.

  `why_not` receives all arguments by name, and returns the reason or None. It
  may depend on shapes, dtypes and options, but not on values of arrays.
  """

  def make(run: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(run)

    def reason(*args, **kwargs) -> str | None:
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      return why_not(**bound.arguments)

    @functools.wraps(run)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
      found = reason(*args, **kwargs)
      if found is not None:
        raise Unsupported(f"{run.__name__}: {found}")
      return run(*args, **kwargs)

    setattr(checked, "why_not", reason)  # noqa: B010
    return checked

  return make


def _is_on_mesh() -> bool:
  """Returns whether code is traced in a shard_map over devices of a known kind.

  Such code is lowered only for the mesh's platform, so `_choose` need not defer
  its choice to lowering. With a collective, XLA would compile a deferred choice
  to a conditional, at which the host would wait for the device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and mesh.abstract_device is not None


def _platform_of(kernel: str) -> str:
  return _PLATFORMS.get(kernel, "cuda")


def target() -> str | None:
  """Guesses where traced code will run: "cuda", "tpu" or None (elsewhere)."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  # In JAX 0.10, abstract devices have no attribute `platform`.
  platform = getattr(device, "platform", jax.default_backend())
  if platform == "tpu":
    return "tpu"
  # Devices of a mesh call the platform "gpu".
  if platform not in ("cuda", "gpu"):
    return None
  if jax.default_backend() != "gpu":
    return "cuda"  # This machine compiles for a mesh of other machines.
  # Only NVIDIA's GPUs have a capability.
  return "cuda" if (capability() or 0) >= OLDEST else None


def may_be_partitioned() -> bool:
  """Returns whether XLA may partition this code; then no Pallas kernel runs."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.auto_axes or mesh.explicit_axes:
    return mesh.size > 1
  # Either no mesh is set, or all its axes are manual, as inside shard_map.
  if mesh.manual_axes or jax.default_backend() not in ("gpu", "tpu"):
    return False
  return jax.device_count() > 1
