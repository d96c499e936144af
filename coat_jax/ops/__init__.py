# SPDX-License-Identifier: Apache-2.0
"""Every operation of a COAT layer, forward and backward.

Each operation is an `Op`: a definition in plain jnp, which determines the
results, and kernels with the same signature. A call passes the definition's
arguments, and optionally `implementation` (see `dispatch`). Operations are not
differentiable: `layers` pairs forward and backward operations with
`jax.custom_vjp`. `activated`, `activation_values`, `activation_derivative`,
`norm_values` and `norm_gradients` are not `Op`s but functions in plain jnp.

Matmuls read `Operand`s, which contain FP8 codes and their scales. They
accumulate in f32, and return the dtype `dtype`.

Norms and activation functions read `QTensor`s, which have one BF16 scale per
1 x G group of the last axis. They compute in f32, without rounding to BF16
before they write codes. Gradients that are not operands, such as `dy`, are BF16
or f32; `dx` is returned in `dtype`.

COAT's Group Scaling: `norm_input` and `activation_input` quantize the input of
a norm or activation function, and also find the scale of its output. The later
operation that writes this output as an operand then needs no extra pass to find
the scale. Inside `jax.shard_map`, devices along a scaling's `axis_names` hold
shards of one tensor and share a scale. Without `axis_names`, each device
computes its own scale.

Source: arXiv:2410.19313, section 5; backward formulas are the derivatives.
"""

from coat_jax.numerics.scaling import Blocks as Blocks
from coat_jax.numerics.scaling import BlockScales as BlockScales
from coat_jax.numerics.scaling import Groups as Groups
from coat_jax.numerics.scaling import Layout as Layout
from coat_jax.numerics.scaling import Operand as Operand
from coat_jax.numerics.scaling import PerTensor as PerTensor
from coat_jax.numerics.scaling import Scales as Scales
from coat_jax.numerics.scaling import Scaling as Scaling
from coat_jax.ops.activation import activated as activated
from coat_jax.ops.activation import activation_bwd as activation_bwd
from coat_jax.ops.activation import (
  activation_bwd_operands as activation_bwd_operands,
)
from coat_jax.ops.activation import (
  activation_derivative as activation_derivative,
)
from coat_jax.ops.activation import activation_fwd as activation_fwd
from coat_jax.ops.activation import activation_input as activation_input
from coat_jax.ops.activation import activation_values as activation_values
from coat_jax.ops.attention import attention_bwd as attention_bwd
from coat_jax.ops.attention import attention_fwd as attention_fwd
from coat_jax.ops.dispatch import Op as Op
from coat_jax.ops.dispatch import explain as explain
from coat_jax.ops.grouped import grouped_dgrad as grouped_dgrad
from coat_jax.ops.grouped import grouped_fwd as grouped_fwd
from coat_jax.ops.grouped import grouped_wgrad as grouped_wgrad
from coat_jax.ops.grouped import take_rows as take_rows
from coat_jax.ops.grouped_linear import (
  grouped_linear_dgrad as grouped_linear_dgrad,
)
from coat_jax.ops.grouped_linear import grouped_linear_fwd as grouped_linear_fwd
from coat_jax.ops.grouped_linear import (
  grouped_linear_wgrad as grouped_linear_wgrad,
)
from coat_jax.ops.grouped_linear import quantize_experts as quantize_experts
from coat_jax.ops.heads import join_heads as join_heads
from coat_jax.ops.heads import join_heads_operand as join_heads_operand
from coat_jax.ops.heads import split_heads as split_heads
from coat_jax.ops.linear import linear_dgrad as linear_dgrad
from coat_jax.ops.linear import linear_fwd as linear_fwd
from coat_jax.ops.linear import linear_wgrad as linear_wgrad
from coat_jax.ops.norm import norm_bwd as norm_bwd
from coat_jax.ops.norm import norm_fwd as norm_fwd
from coat_jax.ops.norm import norm_gradients as norm_gradients
from coat_jax.ops.norm import norm_input as norm_input
from coat_jax.ops.norm import norm_values as norm_values
from coat_jax.ops.quantize import join_columns as join_columns
from coat_jax.ops.quantize import quantize_groups as quantize_groups
from coat_jax.ops.quantize import quantize_rows as quantize_rows
from coat_jax.ops.quantize import quantize_tensor as quantize_tensor
from coat_jax.ops.quantize import tensor_scale as tensor_scale
from coat_jax.ops.quantize import turn_codes as turn_codes
from coat_jax.ops.quantize import turn_operand as turn_operand
from coat_jax.ops.types import Activation as Activation
from coat_jax.ops.types import AttentionKind as AttentionKind
from coat_jax.ops.types import AttentionResiduals as AttentionResiduals
from coat_jax.ops.types import NormKind as NormKind
from coat_jax.ops.types import NormStats as NormStats
