# SPDX-License-Identifier: Apache-2.0
"""A decoder language model of several families, built of COAT's blocks.

All have grouped key heads; `models.config.FAMILIES` has what they differ in.
Layers are stacked, one parameter array [num_layers, ...] for all, and scanned.
As in the paper the embedding, the final norm and the output projection stay in
BF16, the loss in f32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.layers import (
  MLP,
  Attention,
  GatedMLP,
  LayerNorm,
  MoE,
  RMSNorm,
  RoutingStats,
  vocabulary,
)
from coat_jax.models.arguments import (
  check_config,
  check_hidden,
  check_model,
  check_tokens,
)
from coat_jax.models.batch import positions
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.placing import Placed, place_features
from coat_jax.models.remat import check_remat
from coat_jax.models.stack import (
  Store,
  layer_forward,
  stack_layers,
  store_params,
)
from coat_jax.numerics import recipes
from coat_jax.numerics.recipes import CoatRecipe

_INIT_STDDEV = 0.02
# Layers pass on hidden states [B, T, D] and, if there are experts, the
# sums of the layers' statistics.
Carry = tuple[Array, RoutingStats | None]


class DecoderLayer(nnx.Module):
  """Attention and MLP, each with its norm and residual add.

  Attributes:
    attention: an `Attention`.
    mlp: a `GatedMLP` or an `MLP`, or a `MoE` where the family has experts.
  """

  def __init__(
    self,
    config: ModelConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments as for `Decoder`."""
    check_config("DecoderLayer", config, ModelConfig)
    # Projections that write to the residual stream start smaller, so that its
    # variance does not grow with depth.
    out_stddev = _INIT_STDDEV * (2 * config.num_layers) ** -0.5
    choices = config.choices
    post_norm = choices.norm if choices.post_norm else None
    shared: dict[str, Any] = dict(
      recipe=recipe,
      norm=choices.norm if choices.pre_norm else None,
      epsilon=config.norm_eps,
      use_scale=choices.norm_has_scale,
      scale_plus_one=choices.scale_plus_one,
      use_norm_bias=choices.norm_has_bias,
      use_bias=choices.use_bias,
      dtype=dtype,
      kernel_init=nnx.initializers.normal(_INIT_STDDEV),
      out_kernel_init=nnx.initializers.normal(out_stddev),
      rngs=rngs,
    )
    self.attention = Attention(
      config.d_model,
      config.num_heads,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      rope_theta=config.bases,
      rope_scaling=config.scalings,
      rotary_dim=config.rotary_dim,
      window=config.windows,
      qk_norm=choices.qk_norm,
      clip_qkv=config.clip_qkv,
      use_qkv_bias=choices.qkv_bias or choices.use_bias,
      soft_cap=config.attention_soft_cap,
      query_scale=config.query_scale,
      post_norm=post_norm,
      **shared,
    )
    widths = config.d_model, config.d_ff
    if config.num_experts is not None and config.experts_per_token is not None:
      del shared["use_bias"]  # MoE has no biases.
      self.mlp = MoE(
        *widths,
        config.num_experts,
        config.experts_per_token,
        normalize=config.normalize_experts,
        router_init=nnx.initializers.normal(_INIT_STDDEV),
        **shared,
      )
    elif choices.is_gated:
      self.mlp = GatedMLP(
        *widths,
        activation=choices.activation,
        post_norm=post_norm,
        **shared,
      )
    else:
      self.mlp = MLP(
        *widths,
        approximate=config.gelu == "tanh",
        post_norm=post_norm,
        **shared,
      )

  def __call__(
    self,
    x: Array,
    positions: Array | None = None,
    segments: Array | None = None,
    kind: Array | None = None,
  ) -> Array:
    """Maps [B, T, D] to [B, T, D] in `dtype`; see `Attention`."""
    return self.routed(self.attention(x, positions, segments, kind))[0]

  def routed(self, x: Array) -> tuple[Array, RoutingStats | None]:
    """Runs the MLP: [B, T, D] to the same, and its experts' statistics."""
    if isinstance(self.mlp, MoE):
      return self.mlp(x)
    return self.mlp(x), None


class Decoder(nnx.Module):
  """Tokens to the hidden states in front of the output projection.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.models import Decoder, ModelConfig, loss_fn
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> config = ModelConfig(
    ...   family="qwen2", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...   num_kv_heads=2, vocab_size=384, rope_theta=1e6,
    ... )
    >>> model = Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
    >>> loss_fn(model, jnp.zeros((2, 17), jnp.int32)).shape
    ()

  Attributes:
    config: the model's shape.
    embedding: [V, D].
    position_embedding: [max_positions, D], or None without learned positions.
    layers: a DecoderLayer whose parameters have a leading axis of layers.
    norm: the final norm.
    head: [D, V], or None where the embedding is tied.
  """

  def __init__(
    self,
    config: ModelConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: Remat = "none",
    store: Store | None = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters, f32 unless `store` says otherwise.

    Args:
      config: the model's shape.
      recipe: what layers compute and save in FP8; its `axes` are those of the
        mesh that the model is called on.
      dtype: of activations.
      remat: what layers compute again in the backward: "none" of it, all but
        products without a batch ("dots"), or all ("full"), of their input in
        BF16. "fp8", of recipe coat, keeps the FP8 inputs of both norms and
        computes all else but the last product of each block again; "fp8_layer"
        rounds each layer's input to FP8, keeps that and computes all again.
      store: `(path, array) -> array`, in what a parameter is stored that was
        drawn in f32. Layers are drawn one after another then, so that there is
        no stack of them in f32: path and array are those of one layer.
      rngs: its stream `params` initializes the parameters.

    Raises:
      TypeError: an argument of another kind.
      ValueError: an unknown `remat`, or "fp8" where the recipe is not coat.
    """
    check_model("Decoder", config, ModelConfig, recipe, dtype, store, rngs)
    check_remat(remat, recipe)
    self.config = config
    self.dtype, self.axes = dtype, recipe.axes
    self.remat: Remat = remat
    init = nnx.initializers.normal(_INIT_STDDEV)
    shape = (config.vocab_size, config.d_model)
    self.embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))
    self.position_embedding = nnx.data(None)
    if config.max_positions is not None:
      places = (config.max_positions, config.d_model)
      self.position_embedding = nnx.Param(
        init(rngs.params(), places, jnp.float32)
      )

    self.layers = stack_layers(
      lambda rngs: DecoderLayer(config, recipe, dtype=dtype, rngs=rngs),
      config.num_layers,
      store=store,
      rngs=rngs,
    )
    norm = {"rms": RMSNorm, "layer": LayerNorm}[config.choices.norm]
    self.norm = norm(
      config.d_model,
      recipe=recipes.bf16(),
      epsilon=config.norm_eps,
      use_scale=config.choices.norm_has_scale,
      scale_plus_one=config.choices.scale_plus_one,
      dtype=dtype,
      use_bias=config.choices.norm_has_bias,
      rngs=rngs,
    )
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = nnx.Param(init(rngs.params(), shape[::-1], jnp.float32))
    for name in ("embedding", "position_embedding", "norm", "head"):
      store_params(getattr(self, name), name, store)

  def __call__(self, tokens: Array, segments: Array | None = None) -> Array:
    """Runs all but the output projection.

    Args:
      tokens: int32 [B, T].
      segments: int32 [B, T], which document each token is of, or padding: a
        token sees those of its own, and positions begin at 0 in each; None for
        one document a row.

    Returns:
      Hidden states [B, T, D], in `dtype`.
    """
    return self.routed(tokens, segments)[0]

  def routed(
    self,
    tokens: Array,
    segments: Array | None = None,
    placed: Placed | None = None,
  ) -> Carry:
    """Runs the model, and returns what `auxiliary_loss` reads of experts too.

    `placed` replaces the embeddings of some tokens; other arguments are those
    of the call.
    """
    forward = self.layer_forward(segments)
    scan = nnx.scan(forward, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    start = self.start(tokens, segments, placed)
    x, routing = scan(start, self.layers, self.kinds_of_layers)
    return self.norm(x), routing

  def start(
    self,
    tokens: Array,
    segments: Array | None = None,
    placed: Placed | None = None,
  ) -> Carry:
    """Returns what the first layer gets; arguments as for `routed`."""
    e = self.config.num_experts
    zeros = None if e is None else RoutingStats(jnp.zeros(e), jnp.zeros(e))
    return self.embed(tokens, segments, placed), zeros

  def logits(self, tokens: Array, segments: Array | None = None) -> Array:
    """Tokens int32 [B, T] to logits of the next token, f32 [B, T, V]."""
    return self.logits_of_hidden(self(tokens, segments))

  def logits_of_hidden(self, hidden: Array) -> Array:
    """[B, T, D], what the model returns, to logits f32 [B, T, V]."""
    check_hidden("Decoder", hidden, self.config.d_model)
    return vocabulary.logits(
      hidden,
      self.output_weight[...],
      is_tied=self.head is None,
      axes=self.axes,
      soft_cap=self.config.logits_soft_cap,
    )

  @property
  def output_weight(self) -> nnx.Param:
    """The output projection: `head` [D, V], or the embedding [V, D]."""
    return self.embedding if self.head is None else self.head

  def embed(
    self,
    tokens: Array,
    segments: Array | None = None,
    placed: Placed | None = None,
  ) -> Array:
    """Maps tokens to the first layer's input; arguments as for `routed`."""
    check_tokens("Decoder", tokens, segments)
    shape = list(tokens.shape)
    self.config.check_length(f"Decoder: tokens {shape}", shape[-1])
    places = positions(segments)
    if places is None:
      places = jnp.arange(shape[-1], dtype=jnp.int32)
    return self.embed_at(tokens, places, placed)

  def embed_at(
    self, tokens: Array, places: Array, placed: Placed | None = None
  ) -> Array:
    """Embeds tokens at places int32 [T] or [B, T] of their texts."""
    x = vocabulary.embed(
      tokens, self.embedding[...], dtype=self.dtype, axes=self.axes
    )
    if self.config.choices.scales_embedding:
      # Rounded to x's dtype, as in the training of these families.
      x = x * jnp.asarray(self.config.d_model**0.5, x.dtype)
    if placed is not None:
      x = place_features(x, placed, axes=self.axes)
    if self.position_embedding is None:
      return x
    table = self.position_embedding[...]
    return vocabulary.add_positions(x, places, table, axes=self.axes)

  @property
  def kinds_of_layers(self) -> Array | None:
    """`config.kinds_of_layers` as an array; None if all layers are the same."""
    kinds = self.config.kinds_of_layers
    return None if kinds is None else jnp.asarray(kinds, jnp.int32)

  def layer_forward(
    self, segments: Array | None = None
  ) -> Callable[[Carry, DecoderLayer, Array | None], Carry]:
    """Returns the function (carry, layer, kind) that a layer scan runs."""
    where_seen = positions(segments), segments
    attention = self.layers.attention

    def run(x, layer, kind):
      return layer.routed(layer.attention(x, *where_seen, kind))

    kept = layer_forward(
      run,
      attention.active_recipe,
      trained=attention.recipe,
      dtype=self.dtype,
      remat=self.remat,
    )

    def step(carry, layer, kind):
      x, routing = carry
      x, stats = kept(x, layer, kind)
      return x, jax.tree.map(jnp.add, routing, stats)

    return step
