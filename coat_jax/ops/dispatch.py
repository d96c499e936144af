# SPDX-License-Identifier: Apache-2.0
"""One operation, its definition and the implementations that can run it.

An `Op` is called as its definition is, with `implementation` beside:

  None     for a GPU the kernel where it can take these arguments, else "xla"
  "xla"    the definition
  another  this one; it raises `Unsupported` where it cannot take them

`explain` says which it would be, and why. Nothing else depends on the platform.

An implementation has the signature of the definition. Its first statements
raise `Unsupported` with a reason for arguments that it cannot take; after them
it calls `supported`, where a dry run ends.
"""

import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, get_args

import jax

from coat_jax.checks import check_choice, check_function, check_kind, refuse
from coat_jax.ops.explicit import partitioned
from coat_jax.ops.types import Implementation, Layout, Unsupported

# An implementation, or the module that has a function of the operation's name:
# kernels are imported when they are first needed.
type Kernel = str | Callable[..., Any]
type Kernels = tuple[tuple[Implementation, Kernel], ...]

# Kernels, each in a folder of `pallas`, which XLA cannot partition.
_PALLAS = ("triton", "mosaic", "jax_triton")

_in_dry_run = contextvars.ContextVar("in_dry_run", default=False)


@dataclasses.dataclass(frozen=True)
class Op[R]:
  """An operation with its implementations.

  Attributes:
    definition: in plain jnp, and what the signature is.
    check: raises for arguments that no implementation can take, or None.
    kernels: pairs of an implementation's name and its kernel; the first that
      can take the arguments is what a GPU runs.
  """

  definition: Callable[..., R]
  kernels: Kernels = ()
  check: Callable[..., None] | None = None

  def __post_init__(self):
    remedy = "pass the function in plain jnp"
    check_function("Op", "definition", self.definition, remedy)

  @property
  def name(self) -> str:
    return self.definition.__name__

  @property
  def implementations(self) -> tuple[Implementation, ...]:
    """Names that `implementation` can have."""
    return ("xla", *(name for name, _ in self.kernels))

  def require_known(self, implementation: Any, op: str = "") -> None:
    """Raises a NotImplementedError where no implementation has this name.

    Args:
      implementation: the name, or None.
      op: the public function that asks; by default this one.
    """
    if implementation not in (None, *self.implementations):
      raise NotImplementedError(
        f"{op or self.name}: implementation must be one of "
        f"{self.implementations}, got {implementation!r}; pass None to have it "
        "chosen"
      )

  def kernel(self, implementation: str) -> Callable[..., R]:
    """The function behind a name among `implementations`, "xla" excepted."""
    found = dict(self.kernels)[implementation]  # pyright: ignore[reportArgumentType]
    if not isinstance(found, str):
      return found
    room = "ops"
    if implementation in _PALLAS:
      room = f"pallas.{implementation}"
    module = importlib.import_module(f"coat_jax.{room}.{found}")
    return getattr(module, self.name)

  def __call__(
    self, *args: Any, implementation: Implementation | None = None, **kwargs
  ) -> R:
    self.require_known(implementation)
    for x in jax.tree.leaves(args):
      if not hasattr(x, "dtype"):
        remedy = "pass options by keyword"
        refuse(TypeError, self.name, "arguments", "arrays", x, remedy)
    if "layout" in kwargs:
      layouts = get_args(Layout)
      check_choice(self.name, "layout", kwargs["layout"], layouts)
    if self.check is not None:
      self.check(*args, **kwargs)

    def run(args, kwargs) -> R:
      return self._run(implementation, args, kwargs)

    return partitioned(run, args, kwargs)

  def _run(self, implementation: Implementation | None, args, kwargs) -> R:
    if implementation is None:
      return self._choose(args, kwargs)
    if implementation == "xla":
      return self.definition(*args, **kwargs)
    try:
      self._require_whole_arrays(implementation)
      return self.kernel(implementation)(*args, **kwargs)
    except Unsupported as reason:
      raise Unsupported(
        f"{reason}; pass implementation=None to have XLA do it there"
      ) from reason

  def _choose(self, args, kwargs) -> R:
    """The kernel where this is compiled for a GPU, if there is one."""
    for name, _ in self.kernels if _targets_gpu() else ():
      if self._why_not(name, args, kwargs) is None:
        if _is_on_mesh():
          return self.kernel(name)(*args, **kwargs)
        # Once more when it is lowered: on a machine with a GPU a computation
        # can be put on the CPU.
        return jax.lax.platform_dependent(
          *args,
          cuda=functools.partial(self.kernel(name), **kwargs),
          default=functools.partial(self.definition, **kwargs),
        )
    return self.definition(*args, **kwargs)

  def explain(self, *args: Any, **kwargs) -> str:
    """See `ops.explain`."""
    reasons = []
    for name, _ in self.kernels:
      reason = self._why_not(name, args, kwargs)
      if reason is None:
        return f"{self.name}: {name} on a GPU, xla elsewhere"
      reasons.append(reason)
    reasons = reasons or ["there is no kernel for it"]
    return f"{self.name}: xla everywhere ({'; '.join(reasons)})"

  def _why_not(self, implementation: str, args, kwargs) -> str | None:
    """Why an implementation cannot take these, or None, by a dry run."""
    kernel = functools.partial(self.kernel(implementation), **kwargs)
    token = _in_dry_run.set(True)
    try:
      self._require_whole_arrays(implementation)
      jax.eval_shape(kernel, *args)
    except Unsupported as reason:
      return str(reason)
    except _DryRunEnded:
      pass
    finally:
      _in_dry_run.reset(token)
    return None

  def _require_whole_arrays(self, implementation: str) -> None:
    if implementation in _PALLAS and may_be_partitioned():
      raise Unsupported(
        f"{self.name}: with several GPUs a kernel sees one device's part only "
        "inside jax.shard_map, where layers run with recipe.axes=MeshAxes(...)"
      )


def explain(op: Op, *args: Any, **kwargs) -> str:
  """Says which implementation of an op these arguments get, and why.

  Args:
    op: such as `ops.norm_fwd`.
    *args, **kwargs: what it would be called with; traced arrays do too.

  Returns:
    One sentence, as "quantize_groups: triton on a GPU, xla elsewhere".

  Raises:
    TypeError: `op` is no `Op`.
  """
  check_kind("explain", "op", op, Op, "pass one of coat_jax.ops")
  return op.explain(*args, **kwargs)


def op[R](
  check: Callable[..., None] | None = None, **kernels: Kernel
) -> Callable[[Callable[..., R]], Op[R]]:
  """Makes an `Op` of its definition: `@op(triton="norm")`.

  Args:
    check: raises for arguments that no implementation can take, or None.
    **kernels: by the implementation's name a function, or the module that has
      one of the definition's name: of `pallas.triton` and `pallas.mosaic` for
      these two, of `ops` for the others.
  """

  def make(definition: Callable[..., R]) -> Op[R]:
    return Op(definition, tuple(kernels.items()), check)  # pyright: ignore[reportArgumentType]

  return make


class _DryRunEnded(Exception):
  """An implementation can take the arguments of a dry run."""


def supported() -> None:
  """Says in an implementation that it can take its arguments.

  A dry run ends here: asking whether a kernel can run then costs no trace of
  it. An implementation without this call is traced to its end.
  """
  if _in_dry_run.get():
    raise _DryRunEnded


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


def may_be_partitioned() -> bool:
  """Whether XLA may gather arrays for a kernel, which it cannot partition."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.auto_axes or mesh.explicit_axes:
    return mesh.size > 1
  # No mesh is set, or all of its axes are manual: inside shard_map.
  return not mesh.manual_axes and _may_run_on_several_gpus()


def _may_run_on_several_gpus() -> bool:
  return jax.default_backend() == "gpu" and jax.device_count() > 1
