# SPDX-License-Identifier: Apache-2.0
"""Maps the tensors of a checkpoint to the parameters of a vision tower."""

from coat_jax.models.hf.layouts import Row, kernel, plain
from coat_jax.models.vision.config import VisionConfig

# Prefix of a classifier's tensors, except those of its last product.
_VIT = "vit."
# Prefix of the tower's tensors in a whole CLIP or SigLIP, and in every file
# that version 4 of transformers wrote.
_TOWER = "vision_model."


def _rows(
  products: dict[str, str], norms: dict[str, str], qkv: tuple[str, ...]
) -> dict[str, Row]:
  """Returns the rows of products and norms, by path, and of q, k and v."""
  found = {
    "layers/attention/qkv/linear/kernel": kernel(
      *(f"{name}.weight" for name in qkv)
    ),
    "layers/attention/qkv/linear/bias": plain(
      *(f"{name}.bias" for name in qkv)
    ),
  }
  for path, name in products.items():
    found[f"{path}/kernel"] = kernel(f"{name}.weight")
    found[f"{path}/bias"] = plain(f"{name}.bias")
  for path, name in norms.items():
    found[f"{path}/scale"] = plain(f"{name}.weight")
    found[f"{path}/bias"] = plain(f"{name}.bias")
  return found


def _patches(config: VisionConfig, name: str) -> dict[str, Row]:
  """Returns the rows of the convolution that projects patches."""
  sides = config.patch_size, config.patch_size
  shape = (config.d_model, config.num_channels, *sides)
  return {
    "patches/linear/kernel": Row((f"{name}.weight",), True, shape),
    "patches/linear/bias": plain(f"{name}.bias"),
  }


def _clip(config: VisionConfig) -> dict[str, Row]:
  """Returns rows of CLIP and SigLIP, which share most names."""
  layer = "encoder.layers.{i}."
  return {
    "patches/class_embed": plain("embeddings.class_embedding"),
    **_patches(config, "embeddings.patch_embedding"),
    "patches/position_embed": plain("embeddings.position_embedding.weight"),
    **_rows(
      {
        "layers/attention/out": layer + "self_attn.out_proj",
        "layers/mlp/up": layer + "mlp.fc1",
        "layers/mlp/down": layer + "mlp.fc2",
        "pool/out": "head.attention.out_proj",
        "pool/mlp/up": "head.mlp.fc1",
        "pool/mlp/down": "head.mlp.fc2",
      },
      {
        "layers/attention/qkv/norm": layer + "layer_norm1",
        "layers/mlp/norm": layer + "layer_norm2",
        "pre_norm": "pre_layrnorm",  # Misspelled in transformers.
        "norm": "post_layernorm",
        "pool/mlp/norm": "head.layernorm",
      },
      tuple(f"{layer}self_attn.{x}_proj" for x in "qkv"),
    ),
    "pool/probe": Row(("head.probe",), shape=(1, 1, config.d_model)),
    "pool/qkv/kernel": kernel("head.attention.in_proj_weight"),
    "pool/qkv/bias": plain("head.attention.in_proj_bias"),
  }


def _vit(config: VisionConfig) -> dict[str, Row]:
  """Returns ViT's rows; a classifier's tensors but the last have a prefix."""
  start, pool = _VIT, "classifier"
  if config.num_classes is None:
    start, pool = "", "pooler.dense"
  layer, one = start + "encoder.layer.{i}.", (1, 1, config.d_model)
  places = (1, config.num_tokens, config.d_model)
  return {
    "patches/class_embed": Row((start + "embeddings.cls_token",), shape=one),
    **_patches(config, start + "embeddings.patch_embeddings.projection"),
    "patches/position_embed": Row(
      (start + "embeddings.position_embeddings",), shape=places
    ),
    **_rows(
      {
        "layers/attention/out": layer + "attention.output.dense",
        "layers/mlp/up": layer + "intermediate.dense",
        "layers/mlp/down": layer + "output.dense",
        "pool/linear": pool,
      },
      {
        "layers/attention/qkv/norm": layer + "layernorm_before",
        "layers/mlp/norm": layer + "layernorm_after",
        "norm": start + "layernorm",
      },
      tuple(
        f"{layer}attention.attention.{x}" for x in ("query", "key", "value")
      ),
    ),
  }


def vision_table(config: VisionConfig) -> dict[str, Row]:
  """Returns rows for a tower's parameters, and some that it may not have."""
  return _vit(config) if config.family == "vit" else _clip(config)


def of_tower[T](config: VisionConfig, tensors: dict[str, T]) -> dict[str, T]:
  """Selects a tower's tensors from a checkpoint, by the tables' names."""
  if config.family == "vit":
    if config.num_classes is not None:
      return tensors
    return {name.removeprefix(_VIT): x for name, x in tensors.items()}
  if not any(name.startswith(_TOWER) for name in tensors):
    return tensors
  return {
    name.removeprefix(_TOWER): x
    for name, x in tensors.items()
    if name.startswith(_TOWER)
  }
