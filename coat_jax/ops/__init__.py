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

from coat_jax.ops import activation, attention, definitions, rope
from coat_jax.ops.activation import (
  gelu_derivative,
  gelu_values,
  silu_derivative,
  silu_values,
)
from coat_jax.ops.definitions import norm_gradients, norm_values
from coat_jax.ops.dispatch import Kernels, Op, explain
from coat_jax.ops.types import (
  AttentionResiduals,
  Implementation,
  Layout,
  NormKind,
  NormStats,
  Operand,
)

__all__ = [
  "AttentionResiduals",
  "Implementation",
  "Layout",
  "NormKind",
  "NormStats",
  "Op",
  "Operand",
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
_ROPE: Kernels = (("triton", "rope"),)
_CUBLAS: Kernels = (("cublas", "nvidia"),)
_CUDNN: Kernels = (("cudnn", "nvidia"),)

quantize_groups = Op(definitions.quantize_groups, _QUANTIZE)
quantize_tensor = Op(definitions.quantize_tensor, _QUANTIZE)
tensor_scale = Op(definitions.tensor_scale, _QUANTIZE)
join_columns = Op(definitions.join_columns, _JOIN)

linear_fwd = Op(definitions.linear_fwd, _CUBLAS, _check_linear)
linear_dgrad = Op(definitions.linear_dgrad, _CUBLAS)
linear_wgrad = Op(definitions.linear_wgrad, _CUBLAS)

norm_input = Op(definitions.norm_input, _NORM)
norm_fwd = Op(definitions.norm_fwd, _NORM)
norm_bwd = Op(definitions.norm_bwd, _NORM_BACKWARD)

gate_up_input = Op(activation.gate_up_input, _SWIGLU)
silu_mul_fwd = Op(activation.silu_mul_fwd, _SWIGLU)
silu_mul_bwd = Op(activation.silu_mul_bwd)
silu_mul_bwd_operands = Op(activation.silu_mul_bwd_operands, _SWIGLU)
silu_fwd = Op(activation.silu_fwd)
silu_bwd = Op(activation.silu_bwd)
mul_fwd = Op(activation.mul_fwd)
mul_bwd = Op(activation.mul_bwd)

gelu_input = Op(activation.gelu_input, _GELU)
gelu_fwd = Op(activation.gelu_fwd, _GELU)
gelu_bwd = Op(activation.gelu_bwd)
gelu_bwd_operands = Op(activation.gelu_bwd_operands, _GELU)

split_heads = Op(rope.split_heads, _ROPE)
join_heads = Op(rope.join_heads, _ROPE)
join_heads_operand = Op(rope.join_heads_operand, _ROPE)
attention_fwd = Op(attention.attention_fwd, _CUDNN, _check_attention)
attention_bwd = Op(attention.attention_bwd, _CUDNN)
