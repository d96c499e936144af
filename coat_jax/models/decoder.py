# SPDX-License-Identifier: Apache-2.0
"""A decoder language model of several families, built of COAT's blocks.

All have RoPE, grouped key heads and SwiGLU; `models.config.FAMILIES` has what
they differ in. Layers are stacked, one parameter array [num_layers, ...] for
all, and scanned. As in the paper the embedding, the final norm and the output
projection stay in BF16, the loss in f32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import recipe as recipes
from coat_jax.layers import Attention, GatedMLP, LayerNorm, RMSNorm, vocabulary
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.remat import check_remat, checkpointed
from coat_jax.models.specs import param_spec
from coat_jax.recipe import CoatRecipe

_INIT_STDDEV = 0.02


class DecoderLayer(nnx.Module):
  """Attention and gated MLP, each with its norm and residual add.

  Attributes:
    attention: an `Attention`.
    mlp: a `GatedMLP`.
  """

  def __init__(
    self,
    config: ModelConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters.

    Args:
      config: the model's shape; the initial size of what writes to the residual
        stream falls with its depth.
      recipe: what is computed and saved in FP8.
      dtype: of activations.
      rngs: its stream `params` initializes the kernels.
    """
    # Projections that write to the residual stream start smaller, so that its
    # variance does not grow with depth.
    out_stddev = _INIT_STDDEV * (2 * config.num_layers) ** -0.5
    choices = config.choices
    shared: dict[str, Any] = dict(
      recipe=recipe,
      norm=choices.norm if choices.pre_norm else None,
      post_norm=choices.norm if choices.post_norm else None,
      epsilon=config.norm_eps,
      use_scale=choices.norm_has_scale,
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
      rope_theta=config.rope_theta,
      rope_scaling=config.scaling,
      window=config.window,
      qk_norm=choices.qk_norm,
      clip_qkv=config.clip_qkv,
      use_qkv_bias=choices.qkv_bias,
      **shared,
    )
    self.mlp = GatedMLP(config.d_model, config.d_ff, **shared)

  def __call__(self, x: Array) -> Array:
    """[B, T, D] to [B, T, D], in `dtype`."""
    return self.mlp(self.attention(x))


class Decoder(nnx.Module):
  """Tokens to the hidden states in front of the output projection.

  Example usage::

    >>> from coat_jax import recipe
    >>> from coat_jax.models import Decoder, ModelConfig, loss_fn
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> config = ModelConfig(
    ...   family="qwen2", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...   num_kv_heads=2, vocab_size=384, rope_theta=1e6,
    ... )
    >>> model = Decoder(config, recipe.coat(), rngs=nnx.Rngs(0))
    >>> loss_fn(model, jnp.zeros((2, 17), jnp.int32)).shape
    ()

  Attributes:
    config: the model's shape.
    embedding: [V, D].
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
    store: Callable[[str, Array], Array] | None = None,
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
      ValueError: `remat` is "fp8" and the recipe is not coat.
    """
    check_remat(remat, recipe)
    self.config = config
    self.dtype, self.axes = dtype, recipe.axes
    self.remat: Remat = remat
    init = nnx.initializers.normal(_INIT_STDDEV)
    shape = (config.vocab_size, config.d_model)
    self.embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))

    one_by_one = functools.partial(nnx.scan, in_axes=0, out_axes=0)

    @nnx.split_rngs(splits=config.num_layers)
    @(nnx.vmap if store is None else one_by_one)
    def stack(rngs: nnx.Rngs) -> DecoderLayer:
      layer = DecoderLayer(config, recipe, dtype=dtype, rngs=rngs)
      _store(layer, "layers", store)
      return layer

    self.layers = stack(rngs)
    norm = {"rms": RMSNorm, "layer": LayerNorm}[config.choices.norm]
    self.norm = norm(
      config.d_model,
      recipe=recipes.bf16(),
      epsilon=config.norm_eps,
      use_scale=config.choices.norm_has_scale,
      dtype=dtype,
      use_bias=False,
      rngs=rngs,
    )
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = nnx.Param(init(rngs.params(), shape[::-1], jnp.float32))
    for name in ("embedding", "norm", "head"):
      _store(getattr(self, name), name, store)

  def __call__(self, tokens: Array) -> Array:
    """Tokens int32 [B, T] to hidden states [B, T, D], in `dtype`."""
    forward = self.layer_forward()
    scan = nnx.scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return self.norm(scan(self.embed(tokens), self.layers))

  def logits(self, tokens: Array) -> Array:
    """Tokens int32 [B, T] to logits of the next token, f32 [B, T, V]."""
    return self.logits_of_hidden(self(tokens))

  def logits_of_hidden(self, hidden: Array) -> Array:
    """[B, T, D], what the model returns, to logits f32 [B, T, V]."""
    return vocabulary.logits(
      hidden,
      self.output_weight[...],
      is_tied=self.head is None,
      axes=self.axes,
    )

  @property
  def output_weight(self) -> nnx.Param:
    """The output projection: `head` [D, V], or the embedding [V, D]."""
    return self.embedding if self.head is None else self.head

  def embed(self, tokens: Array) -> Array:
    """Tokens int32 [B, T] to the input of the first layer [B, T, D]."""
    return vocabulary.embed(
      tokens, self.embedding[...], dtype=self.dtype, axes=self.axes
    )

  def layer_forward(self) -> Callable[[Array, DecoderLayer], Array]:
    """The function (x, layer) that a scan over layers runs.

    It has what surrounds a layer: shardings on a mesh, weights that are
    gathered for layers that XLA partitions, and `remat`.
    """
    recipe = self.layers.attention.active_recipe
    is_gathering = self.axes is not None and recipe.linear == "bf16"

    def forward(x, layer):
      if self.axes is None:
        return layer(x)
      where = P(self.axes.batch, self.axes.tensor)
      if is_gathering:
        # Were the sequence split, XLA would move the MLP's activations.
        where = P(self.axes.batch)
        x = jax.lax.with_sharding_constraint(x, where)
        layer = _gather_weights(layer, self.dtype, self.axes.fsdp)
      return jax.lax.with_sharding_constraint(layer(x), where)

    remat: Remat = self.remat
    if remat == "fp8_layer" and recipe != self.layers.attention.recipe:
      remat = "none"  # Evaluation in BF16 rounds no residual stream.
    return checkpointed(forward, remat, recipe, is_gathering=is_gathering)


def _store(module: Any, path: str, store: Callable | None) -> None:
  """Stores parameters of a module at `path` as the caller wants them."""
  if store is None or module is None:
    return
  for keys, node in nnx.iter_graph(module):
    if isinstance(node, nnx.Param):
      node.set_value(store("/".join(map(str, (path, *keys))), node[...]))


def _gather_weights(
  layer: DecoderLayer, dtype: DTypeLike, fsdp: str | None
) -> DecoderLayer:
  """For layers that XLA partitions: weights in `dtype` with all their rows.

  Else XLA may split a product along the rows and move activations, or gather
  weights in f32. Gradients go back to the rows' devices where they are summed.
  """

  def gather(path, w):
    spec = param_spec(path)[1:]  # Of one layer.
    whole = P(*(_without(names, fsdp) for names in spec))
    if whole == P(*spec):
      return w
    # Its gradient is f32 and then cast to the weight's dtype.
    return _constrained(w.astype(jnp.float32), dtype, P(*spec), whole)

  graph, params, others = nnx.split(layer, nnx.Param, ...)
  params = jax.tree.map_with_path(gather, nnx.to_pure_dict(params))
  return nnx.merge(graph, params, others)


def _without(names, name: str | None):
  """An entry of a PartitionSpec without one of its axes."""
  if isinstance(names, tuple):
    return tuple(other for other in names if other != name) or None
  return None if names == name else names


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _constrained(w: Array, dtype: DTypeLike, spec: P, whole: P) -> Array:
  del spec
  return jax.lax.with_sharding_constraint(w.astype(dtype), whole)


def _constrained_fwd(w, dtype, spec, whole):
  return _constrained(w, dtype, spec, whole), None


def _constrained_bwd(dtype, spec, whole, residuals, g):
  del dtype, whole, residuals
  return (jax.lax.with_sharding_constraint(g, spec).astype(jnp.float32),)


_constrained.defvjp(_constrained_fwd, _constrained_bwd)


def loss_fn(model: Decoder, tokens: Array) -> Array:
  """Mean cross-entropy of the next token.

  Args:
    model: a Decoder.
    tokens: int32 [B, T + 1].

  Returns:
    f32 scalar, nats per token.
  """
  return loss_of_hidden(model, model(tokens[:, :-1]), tokens[:, 1:])


def loss_of_hidden(model: Decoder, hidden: Array, targets: Array) -> Array:
  """Mean cross-entropy of the targets.

  Args:
    model: a Decoder, of which the output projection is used.
    hidden: [B, T, D], what the model returns.
    targets: int32 [B, T].

  Returns:
    f32 scalar, nats per token.
  """
  return vocabulary.mean_loss(
    hidden,
    targets,
    model.output_weight[...],
    is_tied=model.head is None,
    axes=model.axes,
  )
