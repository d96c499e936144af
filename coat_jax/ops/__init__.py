# SPDX-License-Identifier: Apache-2.0
"""Every operation of a COAT layer, forward and backward.

Each operation is an `Op`: a definition in plain jnp, which determines the
numbers, and GPU implementations with the same name and signature. It is called
like its definition, plus `implementation`: see `dispatch`. Operations are not
differentiated: `layers` pairs forwards and backwards with `jax.custom_vjp`.

Matmuls read `Operand`s: FP8 in the layout that the product needs, scaled by a
`Scaling`. Norms and activation functions read `QTensor`s with one BF16 scale
per 1 x G group of the last axis. All arithmetic between reading codes and
writing codes is f32, without rounding to BF16 in between. `dy` and other plain
gradients are BF16 or f32; `dx` is returned in `dtype`. A definition calls other
definitions, never a kernel: "xla" is plain jnp throughout.

Group Scaling: the operation that produces an operand's values also finds their
largest magnitude (`norm_input`, `gated_input`), so that writing the operand
takes one pass in the forward and, reusing that scale, one in the backward.
Inside `jax.shard_map`, devices along `axis_names` hold shards of one tensor and
share a scale; without names each device's tensor has its own.

Source: arXiv:2410.19313, section 5; the backward formulas are the derivatives.
"""

from coat_jax.numerics.scaling import (
  Blocks,
  BlockScales,
  Groups,
  Layout,
  Operand,
  PerTensor,
  Scales,
  Scaling,
)
from coat_jax.ops.activation import (
  activation_bwd,
  activation_fwd,
  gated_bwd,
  gated_bwd_operands,
  gated_fwd,
  gated_input,
  gelu_bwd,
  gelu_bwd_operands,
  gelu_fwd,
  gelu_input,
  mul_bwd,
  mul_fwd,
)
from coat_jax.ops.attention import attention_bwd, attention_fwd
from coat_jax.ops.dispatch import Op, explain
from coat_jax.ops.functions import (
  activation_derivative,
  activation_values,
  gelu_derivative,
  gelu_values,
  silu_derivative,
  silu_values,
)
from coat_jax.ops.grouped import grouped_dgrad, grouped_fwd, grouped_wgrad
from coat_jax.ops.linear import linear_dgrad, linear_fwd, linear_wgrad
from coat_jax.ops.norm import (
  norm_bwd,
  norm_fwd,
  norm_gradients,
  norm_input,
  norm_values,
)
from coat_jax.ops.quantize import (
  join_columns,
  quantize_groups,
  quantize_rows,
  quantize_tensor,
  tensor_scale,
  turn_operand,
)
from coat_jax.ops.rope import join_heads, join_heads_operand, split_heads
from coat_jax.ops.types import (
  Activation,
  Approximation,
  AttentionKind,
  AttentionResiduals,
  Implementation,
  NormKind,
  NormStats,
)

__all__ = [
  "AttentionKind",
  "Activation",
  "Approximation",
  "AttentionResiduals",
  "BlockScales",
  "Blocks",
  "Groups",
  "Implementation",
  "Layout",
  "NormKind",
  "NormStats",
  "Op",
  "Operand",
  "PerTensor",
  "Scales",
  "Scaling",
  "activation_bwd",
  "activation_derivative",
  "activation_fwd",
  "activation_values",
  "attention_bwd",
  "attention_fwd",
  "explain",
  "gated_bwd",
  "gated_bwd_operands",
  "gated_fwd",
  "gated_input",
  "gelu_bwd",
  "gelu_bwd_operands",
  "gelu_derivative",
  "gelu_fwd",
  "gelu_input",
  "gelu_values",
  "grouped_dgrad",
  "grouped_fwd",
  "grouped_wgrad",
  "join_columns",
  "join_heads",
  "join_heads_operand",
  "linear_dgrad",
  "linear_fwd",
  "linear_wgrad",
  "mul_bwd",
  "mul_fwd",
  "norm_bwd",
  "norm_fwd",
  "norm_gradients",
  "norm_input",
  "norm_values",
  "quantize_groups",
  "quantize_rows",
  "quantize_tensor",
  "silu_derivative",
  "silu_values",
  "split_heads",
  "tensor_scale",
  "turn_operand",
]
