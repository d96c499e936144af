# SPDX-License-Identifier: Apache-2.0
"""Every operation of a COAT layer, forward and backward.

Each is an `Op`: a definition in plain jnp, which gives the numbers, and for a
GPU an implementation with the same name and signature. It is called as its
definition is, with `implementation` beside: see `dispatch`. Nothing is
differentiated through: `layers` pairs forwards and backwards up with
`jax.custom_vjp`.

Conventions. What a matrix product reads is an `Operand`: FP8 with one scale per
tensor, or per block of 128 (`blocks`), in the layout that the product needs.
What a norm or an activation function reads is a `QTensor` with one BF16 scale
per 1 x G group of the last axis. All arithmetic between reading codes and
writing codes is f32, with no BF16 step on the way. `dy` and other plain
gradients are BF16 or f32, `dx` comes back in `dtype`. A definition calls other
definitions, never a kernel: "xla" is plain jnp all the way down.

Group Scaling. The operation that produces the values of an operand finds their
largest magnitude too (`norm_input`, `gated_input`), so that writing the
operand is one pass, in the forward and, with the scale it had, again in the
backward. Inside `jax.shard_map` the devices along `axis_names` have shards of
one tensor, and so one scale; without names each has a tensor of its own.

Source: arXiv:2410.19313, section 5; the backward formulas are the derivatives.
"""

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
from coat_jax.ops.attention_fp8 import (
  FP8AttentionResiduals,
  GradientScales,
  attention_fp8_bwd,
  attention_fp8_fwd,
)
from coat_jax.ops.blocks import (
  quantize_blocks,
  quantize_tiles,
  tile_scales,
  turn_blocks,
)
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
)
from coat_jax.ops.rope import join_heads, join_heads_operand, split_heads
from coat_jax.ops.types import (
  Activation,
  Approximation,
  AttentionKind,
  AttentionResiduals,
  BlockScales,
  Implementation,
  Layout,
  NormKind,
  NormStats,
  Operand,
)

__all__ = [
  "AttentionKind",
  "Activation",
  "Approximation",
  "AttentionResiduals",
  "BlockScales",
  "FP8AttentionResiduals",
  "GradientScales",
  "Implementation",
  "Layout",
  "NormKind",
  "NormStats",
  "Op",
  "Operand",
  "activation_bwd",
  "activation_derivative",
  "activation_fwd",
  "activation_values",
  "attention_bwd",
  "attention_fp8_bwd",
  "attention_fp8_fwd",
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
  "quantize_blocks",
  "quantize_groups",
  "quantize_rows",
  "quantize_tensor",
  "quantize_tiles",
  "silu_derivative",
  "silu_values",
  "split_heads",
  "tensor_scale",
  "tile_scales",
  "turn_blocks",
]
