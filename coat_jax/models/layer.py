# SPDX-License-Identifier: Apache-2.0
"""The layer of decoders and vision towers: attention and an MLP."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import recipes
from coat_jax.layers import MLP, Attention, MoE, RoutingStats
from coat_jax.layers.norm import make_norm
from coat_jax.models.config import ModelConfig
from coat_jax.models.initialization import STDDEV, Start, Store, store_params
from coat_jax.models.vision.config import VisionConfig
from coat_jax.numerics.checks import check_kind
from coat_jax.recipes import CoatRecipe


class TransformerLayer(nnx.Module):
  """Attention and an MLP, each with a norm and a residual add.

  In a vision tower, attention is bidirectional and has no RoPE.

  Attributes:
    attention: an `Attention`.
    mlp: an `MLP`, or a `MoE` if the family has experts.
  """

  def __init__(
    self,
    config: ModelConfig | VisionConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments as for `Decoder`."""
    kinds = (ModelConfig, VisionConfig)
    remedy = "pass the config of a model"
    check_kind("TransformerLayer", "config", config, kinds, remedy)
    choices = config.choices
    # Keeps the residual stream's variance from growing with depth.
    small = nnx.initializers.normal(STDDEV * (2 * config.num_layers) ** -0.5)
    shared = Start(dtype, rngs).options(
      out_kernel_init=small,
      recipe=recipe,
      norm=choices.norm if choices.pre_norm else None,
      epsilon=config.norm_eps,
      use_scale=choices.norm_has_scale,
      use_norm_bias=choices.norm_has_bias,
    )
    # MoE accepts only the shared arguments.
    dense: dict[str, Any] = shared | dict(
      scale_plus_one=choices.scale_plus_one,
      use_bias=choices.use_bias,
      post_norm=choices.norm if choices.post_norm else None,
    )
    self.attention = Attention(
      config.d_model,
      config.num_heads,
      qk_norm=choices.qk_norm,
      use_qkv_bias=choices.qkv_bias or choices.use_bias,
      **config.attention_options,
      **dense,
    )
    widths = config.d_model, config.d_ff
    if isinstance(config, ModelConfig) and choices.has_experts:
      experts: Any = config.num_experts, config.experts_per_token
      self.mlp = MoE(
        *widths,
        *experts,
        normalize=config.normalize_experts,
        router_init=shared["kernel_init"],
        **shared,
      )
    else:
      self.mlp = MLP(
        *widths, activation=config.activation, gated=choices.is_gated, **dense
      )

  def __call__(
    self,
    x: Array,
    positions: Array | None = None,
    segments: Array | None = None,
    kind: Array | None = None,
  ) -> Array:
    """Maps [B, T, D] to [B, T, D] in `dtype`; arguments as for `Attention`."""
    return self.routed(self.attention(x, positions, segments, kind))[0]

  def routed(self, x: Array) -> tuple[Array, RoutingStats | None]:
    """Runs the MLP; returns [B, T, D] and, for a MoE, routing statistics."""
    y = self.mlp(x)
    return y if isinstance(y, tuple) else (y, None)


def stack_layers(
  config: ModelConfig | VisionConfig,
  recipe: CoatRecipe,
  start: Start,
  store: Store | None,
) -> TransformerLayer:
  """Makes and stacks layers, one at a time if `store` is given."""
  one_by_one = functools.partial(nnx.scan, in_axes=0, out_axes=0)

  @nnx.split_rngs(splits=config.num_layers)
  @(nnx.vmap if store is None else one_by_one)
  def stack(rngs: nnx.Rngs) -> TransformerLayer:
    layer = TransformerLayer(config, recipe, dtype=start.dtype, rngs=rngs)
    store_params(layer, "layers", store)
    return layer

  return stack(start.rngs)


def outer_norm(config: ModelConfig | VisionConfig, start: Start) -> Any:
  """Makes a norm, in BF16, that runs before or after the stack of layers."""
  choices = config.choices
  return make_norm(
    choices.norm,
    config.d_model,
    epsilon=config.norm_eps,
    use_scale=choices.norm_has_scale,
    scale_plus_one=choices.scale_plus_one,
    use_bias=choices.norm_has_bias,
    recipe=recipes.bf16(),
    dtype=start.dtype,
    rngs=start.rngs,
  )
