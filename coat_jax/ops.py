# SPDX-License-Identifier: Apache-2.0
"""The operations that layers are made of, and who carries them out.

Layers call these and never `reference` itself. Each is an `Op`: a definition in
plain jnp and, for a GPU, an implementation with the same name and signature. It
is called as its definition is, with `implementation` beside:

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

from coat_jax import (
  adam,
  reference,
  reference_activation,
  reference_attention,
  reference_rope,
)
from coat_jax.op_types import (
  AttentionResiduals,
  Implementation,
  Layout,
  NormKind,
  NormStats,
  Operand,
)
from coat_jax.reference import norm_gradients, norm_values
from coat_jax.reference_activation import (
  gelu_derivative,
  gelu_values,
  silu_derivative,
  silu_values,
)

__all__ = [
  "AttentionResiduals",
  "Implementation",
  "Layout",
  "NormKind",
  "NormStats",
  "Op",
  "Operand",
  "adam_update",
  "adamw_step",
  "attention_bwd",
  "attention_fwd",
  "explain",
  "gelu_bwd",
  "gelu_bwd_operands",
  "gelu_derivative",
  "gelu_fwd",
  "gelu_input",
  "gelu_values",
  "join_columns",
  "join_heads",
  "join_heads_operand",
  "linear_dgrad",
  "linear_fwd",
  "linear_wgrad",
  "mul_bwd",
  "mul_fwd",
  "gate_up_input",
  "norm_bwd",
  "norm_fwd",
  "norm_gradients",
  "norm_input",
  "norm_values",
  "quantize_groups",
  "quantize_tensor",
  "residual_add_bwd",
  "residual_add_fwd",
  "silu_bwd",
  "silu_derivative",
  "silu_fwd",
  "silu_mul_bwd",
  "silu_mul_bwd_operands",
  "silu_mul_fwd",
  "silu_values",
  "split_heads",
  "tensor_scale",
]


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
    return self._kernel(module)(*args, **kwargs)

  def _choose(self, args, kwargs) -> R:
    """The kernel where this is compiled for a GPU, if there is one."""
    for name, module in self.kernels if _targets_gpu() else ():
      if self._unsupported(name, module, args, kwargs) is None:
        if _is_on_mesh():
          return self._kernel(module)(*args, **kwargs)
        # Once more when it is lowered: on a machine with a GPU a computation
        # can be put on the CPU.
        return jax.lax.platform_dependent(
          *args,
          cuda=functools.partial(self._kernel(module), **kwargs),
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

  def _kernel(self, module: str) -> Callable[..., R]:
    return getattr(_module(module), self.name)

  def _unsupported(
    self, implementation: str, module: str, args, kwargs
  ) -> str | None:
    if implementation in ("triton", "mosaic") and _may_be_partitioned():
      return (
        f"{self.name}: with several GPUs a kernel sees one device's part only "
        "inside jax.shard_map"
      )
    return getattr(_module(module), f"{self.name}_unsupported")(*args, **kwargs)


def explain(op: Op, *args: Any, **kwargs) -> str:
  """Says which implementation of an op these arguments get, and why.

  Args:
    op: such as `ops.norm_fwd`.
    *args, **kwargs: what it would be called with; traced arrays do too.

  Returns:
    One sentence, as "quantize_groups: triton on a GPU, xla elsewhere".
  """
  return op.explain(*args, **kwargs)


def _module(name: str):
  """A module with kernels, imported when first needed."""
  if name == "nvidia":
    from coat_jax import nvidia

    return nvidia
  from coat_jax import pallas

  return importlib.import_module(f"{pallas.__name__}.{name}")


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


def _check_linear(x: Operand, w: Operand, **kwargs) -> None:
  del kwargs
  if x.rows is None or w.columns is None or w.columns.ndim != 2:
    raise ValueError(
      "linear: needs x in rows and a weight [D, F] in columns, got "
      f"{_layout_of(x)} and {_layout_of(w)}"
    )
  if x.rows.shape[-1] != w.columns.shape[1]:
    raise ValueError(
      "linear: x [..., D] needs a weight [D, F], got x "
      f"{x.rows.shape} and weight {w.columns.shape[::-1]}"
    )


def _layout_of(operand: Operand) -> str:
  shapes = [None if x is None else x.shape for x in operand[:2]]
  return f"rows {shapes[0]} and columns {shapes[1]}"


def _check_attention(q, k, v, *, causal: bool) -> None:
  del causal
  fits = q.ndim == k.ndim == 4 and k.shape == v.shape
  fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
  if not fits or q.shape[2] % k.shape[2]:
    raise ValueError(
      "attention: needs q [B, T, N, H] and k, v [B, S, K, H] with N a "
      f"multiple of K, got q {q.shape}, k {k.shape}, v {v.shape}"
    )


_QUANTIZE: Kernels = (("triton", "quantize"),)
_JOIN: Kernels = (("triton", "join"),)
_NORM: Kernels = (("triton", "norm"),)
_NORM_BACKWARD: Kernels = (("triton", "norm_backward"),)
_SWIGLU: Kernels = (("triton", "swiglu"),)
_GELU: Kernels = (("triton", "gelu"),)
_RESIDUAL_ADD: Kernels = (("triton", "residual_add"),)
_ROPE: Kernels = (("triton", "rope"),)
_OPTIMIZER: Kernels = (("mosaic", "optimizer"),)
_CUBLAS: Kernels = (("cublas", "nvidia"),)
_CUDNN: Kernels = (("cudnn", "nvidia"),)

quantize_groups = Op(reference.quantize_groups, _QUANTIZE)
quantize_tensor = Op(reference.quantize_tensor, _QUANTIZE)
tensor_scale = Op(reference.tensor_scale, _QUANTIZE)
join_columns = Op(reference.join_columns, _JOIN)

linear_fwd = Op(reference.linear_fwd, _CUBLAS, _check_linear)
linear_dgrad = Op(reference.linear_dgrad, _CUBLAS)
linear_wgrad = Op(reference.linear_wgrad, _CUBLAS)

norm_input = Op(reference.norm_input, _NORM)
norm_fwd = Op(reference.norm_fwd, _NORM)
norm_bwd = Op(reference.norm_bwd, _NORM_BACKWARD)

gate_up_input = Op(reference_activation.gate_up_input, _SWIGLU)
silu_mul_fwd = Op(reference_activation.silu_mul_fwd, _SWIGLU)
silu_mul_bwd = Op(reference_activation.silu_mul_bwd)
silu_mul_bwd_operands = Op(reference_activation.silu_mul_bwd_operands, _SWIGLU)
silu_fwd = Op(reference_activation.silu_fwd)
silu_bwd = Op(reference_activation.silu_bwd)
mul_fwd = Op(reference_activation.mul_fwd)
mul_bwd = Op(reference_activation.mul_bwd)

gelu_input = Op(reference_activation.gelu_input, _GELU)
gelu_fwd = Op(reference_activation.gelu_fwd, _GELU)
gelu_bwd = Op(reference_activation.gelu_bwd)
gelu_bwd_operands = Op(reference_activation.gelu_bwd_operands, _GELU)

residual_add_fwd = Op(reference.residual_add_fwd, _RESIDUAL_ADD)
residual_add_bwd = Op(reference.residual_add_bwd, _RESIDUAL_ADD)

split_heads = Op(reference_rope.split_heads, _ROPE)
join_heads = Op(reference_rope.join_heads, _ROPE)
join_heads_operand = Op(reference_rope.join_heads_operand, _ROPE)
attention_fwd = Op(reference_attention.attention_fwd, _CUDNN, _check_attention)
attention_bwd = Op(reference_attention.attention_bwd, _CUDNN)

adam_update = Op(adam.adam_update, _OPTIMIZER)
adamw_step = Op(adam.adamw_step, _OPTIMIZER)
