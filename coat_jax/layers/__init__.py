# SPDX-License-Identifier: Apache-2.0
"""Flax NNX layers that save activations in FP8, and the functions they call.

Linear, RMSNorm, LayerNorm and `activate` are drop-in replacements for single
operations. NormLinear, MLP, MoE and Attention are fused blocks, which account
for most of the savings in memory and time. To make another block, subclass
`Middle`.
"""

from coat_jax.layers.activation import activate as activate
from coat_jax.layers.attention import Attention as Attention
from coat_jax.layers.block import BlockWeights as BlockWeights
from coat_jax.layers.block import block as block
from coat_jax.layers.block_module import BlockOptions as BlockOptions
from coat_jax.layers.block_module import NormLinear as NormLinear
from coat_jax.layers.block_module import NormLinearOptions as NormLinearOptions
from coat_jax.layers.convert import ConversionReport as ConversionReport
from coat_jax.layers.convert import convert as convert
from coat_jax.layers.dot_product_attention import (
  AttentionInputs as AttentionInputs,
)
from coat_jax.layers.dot_product_attention import (
  dot_product_attention as dot_product_attention,
)
from coat_jax.layers.experts import MoEWeights as MoEWeights
from coat_jax.layers.linear import Linear as Linear
from coat_jax.layers.linear import linear as linear
from coat_jax.layers.linear import norm_linear as norm_linear
from coat_jax.layers.middle import Middle as Middle
from coat_jax.layers.middle import MiddleGradient as MiddleGradient
from coat_jax.layers.middle import MiddleOutput as MiddleOutput
from coat_jax.layers.mlp import MLP as MLP
from coat_jax.layers.mlp import Elementwise as Elementwise
from coat_jax.layers.moe import MoE as MoE
from coat_jax.layers.moe import moe as moe
from coat_jax.layers.norm import LayerNorm as LayerNorm
from coat_jax.layers.norm import RMSNorm as RMSNorm
from coat_jax.layers.norm import norm as norm
from coat_jax.layers.product import LinearWeights as LinearWeights
from coat_jax.layers.product import cache_weight as cache_weight
from coat_jax.layers.qk_norm import QKNorm as QKNorm
from coat_jax.layers.qk_norm import QKNormWeights as QKNormWeights
from coat_jax.layers.remat import (
  block_inputs_saveable as block_inputs_saveable,
)
from coat_jax.layers.remat import fp8_remat as fp8_remat
from coat_jax.layers.residuals import RESIDUAL_NAMES as RESIDUAL_NAMES
from coat_jax.layers.rope import Heads as Heads
from coat_jax.layers.rope import rope as rope
from coat_jax.layers.rope import split_heads as split_heads
from coat_jax.layers.routing import RoutingStats as RoutingStats
from coat_jax.layers.routing import load_balancing_loss as load_balancing_loss
from coat_jax.layers.self_attention import SelfAttention as SelfAttention
from coat_jax.layers.weight_cache import with_weight_cache as with_weight_cache
from coat_jax.ops.rope import LinearScaling as LinearScaling
from coat_jax.ops.rope import Llama3Scaling as Llama3Scaling
from coat_jax.ops.rope import RopeScaling as RopeScaling
from coat_jax.ops.rope import Rotary as Rotary
from coat_jax.ops.rope import YarnScaling as YarnScaling
