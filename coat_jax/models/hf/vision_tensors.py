# SPDX-License-Identifier: Apache-2.0
"""Maps the tensors of a checkpoint to the parameters of a vision tower."""

from typing import Any

from coat_jax.models.hf.layouts import SAME, TRANSPOSED, Layout, Row
from coat_jax.models.hf.pack import pack_qkv, unpack_qkv
from coat_jax.models.vision import VisionConfig

# Prefix of a classifier's tensors, except those of its last product.
_VIT = "vit."
# Prefix of the tower's tensors in a whole CLIP or SigLIP, and in every file
# that version 4 of transformers wrote.
_TOWER = "vision_model."

_QKV = Layout(
  lambda config, *qkv: pack_qkv(*qkv, num_kv_heads=config.num_heads),
  lambda config, qkv: unpack_qkv(
    qkv, num_heads=config.num_heads, num_kv_heads=config.num_heads
  ),
)
_IN_FRONT = Layout(
  lambda _, x: x.reshape(x.shape[-1]),
  lambda _, x: (x.reshape(1, 1, -1),),
  is_transposed=False,
)
_POSITIONS = Layout(
  lambda _, x: x[0], lambda _, x: (x[None],), is_transposed=False
)
_PATCHES = Layout(
  lambda _, x: x.reshape(x.shape[0], -1).T,
  lambda config, x: (_images(config, x),),
)


def _images(config: VisionConfig, kernel: Any) -> Any:
  """Reshapes a patch kernel [C P P, D] to a convolution's [D, C, P, P]."""
  sides = (config.patch_size, config.patch_size)
  return kernel.T.reshape(config.d_model, config.num_channels, *sides)


def _rows(
  *products: tuple[str, str], norms: tuple[tuple[str, str], ...]
) -> dict[str, Row]:
  """Returns the rows of products and norms, given as (path, name) pairs."""
  found = {}
  for path, name in products:
    found[f"{path}/kernel"] = Row(TRANSPOSED, (f"{name}.weight",))
    found[f"{path}/bias"] = Row(SAME, (f"{name}.bias",))
  for path, name in norms:
    found[f"{path}/scale"] = Row(SAME, (f"{name}.weight",))
    found[f"{path}/bias"] = Row(SAME, (f"{name}.bias",))
  return found


def _qkv(names: tuple[str, ...]) -> dict[str, Row]:
  return {
    f"layers/attention/qkv/linear/{own}": Row(
      _QKV, tuple(f"{name}.{end}" for name in names)
    )
    for own, end in (("kernel", "weight"), ("bias", "bias"))
  }


_LAYER = "encoder.layers.{i}."
# The rows of CLIP and SigLIP; CLIP has no patch bias, SigLIP no class token.
_CLIP = {
  "patches/class_embed": Row(SAME, ("embeddings.class_embedding",)),
  "patches/linear/kernel": Row(
    _PATCHES, ("embeddings.patch_embedding.weight",)
  ),
  "patches/linear/bias": Row(SAME, ("embeddings.patch_embedding.bias",)),
  "patches/position_embed": Row(
    SAME, ("embeddings.position_embedding.weight",)
  ),
  **_qkv(tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv")),
  **_rows(
    ("layers/attention/out", _LAYER + "self_attn.out_proj"),
    ("layers/mlp/up", _LAYER + "mlp.fc1"),
    ("layers/mlp/down", _LAYER + "mlp.fc2"),
    norms=(
      ("layers/attention/qkv/norm", _LAYER + "layer_norm1"),
      ("layers/mlp/norm", _LAYER + "layer_norm2"),
      ("pre_norm", "pre_layrnorm"),  # Misspelled in transformers.
      ("norm", "post_layernorm"),
    ),
  ),
}
_SIGLIP = _CLIP | {
  "pool/probe": Row(_IN_FRONT, ("head.probe",)),
  "pool/qkv/kernel": Row(TRANSPOSED, ("head.attention.in_proj_weight",)),
  "pool/qkv/bias": Row(SAME, ("head.attention.in_proj_bias",)),
  **_rows(
    ("pool/out", "head.attention.out_proj"),
    ("pool/mlp/up", "head.mlp.fc1"),
    ("pool/mlp/down", "head.mlp.fc2"),
    norms=(("pool/mlp/norm", "head.layernorm"),),
  ),
}


def _vit(start: str, pool: str) -> dict[str, Row]:
  """Returns ViT's rows.

  Args:
    start: prefix of all names except those of the pool.
    pool: name of the product that reads the class token.
  """
  layer = start + "encoder.layer.{i}."
  patches = start + "embeddings.patch_embeddings.projection"
  return {
    "patches/class_embed": Row(_IN_FRONT, (start + "embeddings.cls_token",)),
    "patches/linear/kernel": Row(_PATCHES, (patches + ".weight",)),
    "patches/linear/bias": Row(SAME, (patches + ".bias",)),
    "patches/position_embed": Row(
      _POSITIONS, (start + "embeddings.position_embeddings",)
    ),
    **_qkv(
      tuple(
        f"{layer}attention.attention.{x}" for x in ("query", "key", "value")
      )
    ),
    **_rows(
      ("layers/attention/out", layer + "attention.output.dense"),
      ("layers/mlp/up", layer + "intermediate.dense"),
      ("layers/mlp/down", layer + "output.dense"),
      ("pool/linear", pool),
      norms=(
        ("layers/attention/qkv/norm", layer + "layernorm_before"),
        ("layers/mlp/norm", layer + "layernorm_after"),
        ("norm", start + "layernorm"),
      ),
    ),
  }


_CLASSIFIER, _ENCODER = _vit(_VIT, "classifier"), _vit("", "pooler.dense")


def vision_table(config: VisionConfig) -> dict[str, Row]:
  """Returns rows for a tower's parameters, and some that it may not have."""
  if config.family == "vit":
    return _ENCODER if config.num_classes is None else _CLASSIFIER
  return {"clip_vision": _CLIP, "siglip_vision": _SIGLIP}[config.family]


def of_tower[T](config: VisionConfig, tensors: dict[str, T]) -> dict[str, T]:
  """Selects a tower's tensors from a checkpoint, under the tables' names.

  Args:
    config: the tower's configuration.
    tensors: by name; a whole model's text tensors are left out.
  """
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
