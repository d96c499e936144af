# SPDX-License-Identifier: Apache-2.0
"""A decoder language model for several families, made of COAT's blocks.

As in the paper, the embedding, the final norm and the output projection stay in
BF16, and the loss stays in f32.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.layers import RoutingStats, vocabulary
from coat_jax.models.arguments import check_hidden, check_model, check_tokens
from coat_jax.models.batch import positions
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.initialization import Start, Store, store_params
from coat_jax.models.layer import outer_norm, stack_layers
from coat_jax.models.placing import Placed, place_features
from coat_jax.models.remat import Carry, check_remat, run_layers
from coat_jax.recipes import CoatRecipe


class Decoder(nnx.Module):
  """Maps tokens to the hidden states before the output projection.

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
    embedding: [V, D], for V tokens and width D.
    position_embedding: [max_positions, D], or None without learned positions.
    layers: a `TransformerLayer` whose parameters have a leading axis of layers.
    norm: the final norm.
    head: [D, V], or None if the embedding is also the output projection.
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
    """Initializes the parameters, in f32 unless `store` converts them.

    Args:
      config: the model's shape.
      recipe: what layers compute and save in FP8. Its `axes` must be those of
        the mesh on which the model is called.
      dtype: dtype of activations.
      remat: what layers recompute in the backward pass; see `Remat`.
      store: a function `(path, array) -> array` that converts a parameter from
        f32 to the form in which it is stored. If given, layers are initialized
        and converted one at a time, so that the whole stack never exists in
        f32. None keeps f32.
      rngs: parameters are drawn from its stream `params`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `remat` is unknown, or does not fit the recipe (see `Remat`).
    """
    check_model("Decoder", config, ModelConfig, recipe, dtype, store, rngs)
    check_remat(remat, recipe)
    self.config = config
    self.dtype, self.axes = dtype, recipe.axes
    self.remat: Remat = remat
    start = Start(dtype, rngs)
    self.embedding = start.param(config.vocab_size, config.d_model)
    self.position_embedding = nnx.data(None)
    if config.max_positions is not None:
      self.position_embedding = start.param(
        config.max_positions, config.d_model
      )
    self.layers = stack_layers(config, recipe, start, store)
    self.norm = outer_norm(config, start)
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = start.param(config.d_model, config.vocab_size)
    for name in ("embedding", "position_embedding", "norm", "head"):
      store_params(getattr(self, name), name, store)

  def __call__(self, tokens: Array, segments: Array | None = None) -> Array:
    """Runs everything but the output projection.

    Args:
      tokens: int32 [B, T].
      segments: int32 [B, T], the index of each token's document; padding has
        an index too. Tokens attend only within their document, and positions
        start at 0 in each document. None if each row is one document.

    Returns:
      Hidden states [B, T, D] in `dtype`.
    """
    return self.routed(tokens, segments)[0]

  def logits(self, tokens: Array, segments: Array | None = None) -> Array:
    """Maps tokens int32 [B, T] to logits of the next token, f32 [B, T, V]."""
    return self.logits_of_hidden(self(tokens, segments))

  def logits_of_hidden(self, hidden: Array) -> Array:
    """Maps the model's output [B, T, D] to logits f32 [B, T, V]."""
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

  def routed(
    self,
    tokens: Array,
    segments: Array | None = None,
    placed: Placed | None = None,
  ) -> Carry:
    """Returns hidden states and, if there are experts, routing statistics."""
    start = self.start(tokens, segments, placed)
    x, routing = run_layers(
      self, self.layers, start, self.kinds_of_layers, segments
    )
    return self.norm(x), routing

  def start(
    self,
    tokens: Array,
    segments: Array | None = None,
    placed: Placed | None = None,
  ) -> Carry:
    """Returns the first layer's input, and zero routing statistics or None."""
    check_tokens("Decoder", tokens, segments)
    shape = list(tokens.shape)
    self.config.check_length(f"Decoder: tokens {shape}", shape[-1])
    places = positions(segments)
    if places is None:
      places = jnp.arange(shape[-1], dtype=jnp.int32)
    e = self.config.num_experts
    zeros = None if e is None else RoutingStats(jnp.zeros(e), jnp.zeros(e))
    return self.embed_at(tokens, places, placed), zeros

  def embed_at(
    self, tokens: Array, places: Array, placed: Placed | None
  ) -> Array:
    """Embeds tokens at positions [T] or [B, T], and inserts image features."""
    x = vocabulary.embed(
      tokens, self.embedding[...], dtype=self.dtype, axes=self.axes
    )
    if self.config.choices.scales_embedding:
      # These families were trained with this factor rounded to x's dtype.
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
