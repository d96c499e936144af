# SPDX-License-Identifier: Apache-2.0
"""A vision tower for several families, made of COAT's blocks.

As in a decoder, everything outside the layers stays in BF16: the patch
projection, the norms before and after the layers, and pooling.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.models.arguments import check_model
from coat_jax.models.config import Remat
from coat_jax.models.initialization import Start, Store, store_params
from coat_jax.models.layer import outer_norm, stack_layers
from coat_jax.models.remat import check_remat, run_layers
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision.ends import AttentionPool, ClassPool, PatchEmbedding
from coat_jax.numerics.checks import Range, check_whole
from coat_jax.recipes import CoatRecipe

_POOLS = {"class": ClassPool, "attention": AttentionPool}


class VisionTower(nnx.Module):
  """Maps images to hidden states, to one vector per image, or to class logits.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.models import VisionConfig, VisionTower
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> config = VisionConfig(
    ...   family="siglip_vision", num_layers=2, d_model=64, d_ff=128,
    ...   num_heads=4, image_size=28, patch_size=14,
    ... )
    >>> tower = VisionTower(config, recipes.coat(), rngs=nnx.Rngs(0))
    >>> images = jnp.zeros((2, 3, 28, 28))
    >>> tower.features(images, layer=-2).shape
    (2, 4, 64)
    >>> tower.pooled(images).shape
    (2, 64)

  Attributes:
    config: the tower's shape.
    patches: `PatchEmbedding`.
    pre_norm: LayerNorm before the first layer, in CLIP; otherwise None.
    layers: a `TransformerLayer` whose parameters have a leading axis of layers.
    norm: LayerNorm after the last layer.
    pool: `ClassPool` or `AttentionPool`; None if pooling has no weights.
  """

  def __init__(
    self,
    config: VisionConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: Remat = "none",
    store: Store | None = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments and errors as for `Decoder`."""
    check_model("VisionTower", config, VisionConfig, recipe, dtype, store, rngs)
    check_remat(remat, recipe)
    self.config, self.dtype, self.axes = config, dtype, recipe.axes
    self.remat: Remat = remat
    start, choices = Start(dtype, rngs), config.choices

    self.patches = PatchEmbedding(config, start)
    self.pre_norm = nnx.data(None)
    if choices.norms_input:
      self.pre_norm = outer_norm(config, start)
    self.layers = stack_layers(config, recipe, start, store)
    self.norm = outer_norm(config, start)
    self.pool = nnx.data(None)
    if config.has_pool and choices.pool is not None:
      self.pool = _POOLS[choices.pool](config, start)
    for name in ("patches", "pre_norm", "norm", "pool"):
      store_params(getattr(self, name), name, store)

  def __call__(self, pixel_values: Array) -> Array:
    """Computes the first output of the family's Hugging Face model.

    Args:
      pixel_values: images [B, C, H, W], BF16 or f32, resized and normalized.

    Returns:
      Logits f32 [B, classes] if the tower has classes; otherwise hidden states
      [B, N, D] in `dtype`, with N = `config.num_tokens`. In CLIP, these are
      the states before the last norm.
    """
    if self.config.num_classes is not None:
      return self.pooled(pixel_values).astype(jnp.float32)
    return self._output(self.features(pixel_values))

  def pooled(self, pixel_values: Array) -> Array:
    """Returns one vector per image: Hugging Face's `pooler_output`, or logits.

    Args:
      pixel_values: as for `__call__`.

    Returns:
      [B, D] in `dtype`, or logits [B, classes] if the tower has classes.

    Raises:
      ValueError: the configuration has `has_pool=False`.
    """
    hidden = self.features(pixel_values)
    if self.config.choices.pool is None:
      return self.norm(hidden[:, :1])[:, 0]
    if self.pool is None:
      raise ValueError(
        "VisionTower: pooling needs weights, got a configuration with "
        "has_pool=False; pool the hidden states yourself"
      )
    return self.pool(self._output(hidden))

  def features(self, pixel_values: Array, *, layer: int = -1) -> Array:
    """Returns the hidden states after a layer, before the last norm.

    Args:
      pixel_values: as for `__call__`.
      layer: 0 for the input of the first layer, 1 for its output, and so on.
        Negative values count from the end: -1 is the output of the last layer,
        and -2 (LLaVA's default) is the output of the layer before it. Layers
        after the selected one do not run.

    Returns:
      [B, N, D] in `dtype`; if there is a class token, it comes first.

    Raises:
      ValueError: there is no such layer, the images do not have the configured
        size, or N is not a multiple of the size of the mesh's tensor axis.
    """
    count = self.config.num_layers
    allowed, remedy = Range(-count - 1, count), "-1 is the last layer's output"
    check_whole("VisionTower", "layer", layer, allowed, remedy)
    self._check_mesh()
    x = self.patches(pixel_values)
    if self.pre_norm is not None:
      x = self.pre_norm(x)
    layers, wanted = self.layers, layer % (count + 1)
    if wanted == 0:
      return x
    if wanted < count:
      graph, state = nnx.split(layers)
      layers = nnx.merge(graph, jax.tree.map(lambda w: w[:wanted], state))
    return run_layers(self, layers, (x, None))[0]

  def _output(self, hidden: Array) -> Array:
    """Applies the last norm to hidden states if `norms_output` is True."""
    return self.norm(hidden) if self.config.choices.norms_output else hidden

  def _check_mesh(self) -> None:
    """Raises ValueError if the tensor axis cannot split the tokens evenly."""
    if self.axes is None or self.axes.tensor is None:
      return
    mesh = jax.sharding.get_abstract_mesh()
    devices = mesh.shape.get(self.axes.tensor, 1)
    if self.config.num_tokens % devices:
      raise ValueError(
        "VisionTower: a mesh's tensor axis must evenly divide an image's "
        f"{self.config.num_tokens} tokens, got {devices} devices; pass a mesh "
        "with tensor=1"
      )
