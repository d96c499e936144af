# SPDX-License-Identifier: Apache-2.0
"""Decoder and vision-language models and vision towers, built of the layers.

A `ModelConfig` is the shape of a model, and names its family; a family is a row
of `FAMILIES`. `load_hf` and `save_hf` read and write checkpoints of
Hugging Face's transformers.
"""

from coat_jax.models.batch import Batch as Batch
from coat_jax.models.config import FAMILIES as FAMILIES
from coat_jax.models.config import Family as Family
from coat_jax.models.config import ModelConfig as ModelConfig
from coat_jax.models.config import Remat as Remat
from coat_jax.models.decoder import Decoder as Decoder
from coat_jax.models.decoder import DecoderLayer as DecoderLayer
from coat_jax.models.generate import Generation as Generation
from coat_jax.models.generate import generate as generate
from coat_jax.models.hf.load import load_hf as load_hf
from coat_jax.models.hf.pack import pack_gate_up as pack_gate_up
from coat_jax.models.hf.pack import pack_qkv as pack_qkv
from coat_jax.models.hf.pack import unpack_gate_up as unpack_gate_up
from coat_jax.models.hf.pack import unpack_qkv as unpack_qkv
from coat_jax.models.hf.save import save_hf as save_hf
from coat_jax.models.loss import loss_fn as loss_fn
from coat_jax.models.rope import parse_scaling as parse_scaling
from coat_jax.models.specs import param_shardings as param_shardings
from coat_jax.models.vision import VISION_FAMILIES as VISION_FAMILIES
from coat_jax.models.vision import VisionConfig as VisionConfig
from coat_jax.models.vision import VisionLayer as VisionLayer
from coat_jax.models.vision import VisionTower as VisionTower
from coat_jax.models.vision_language import Projector as Projector
from coat_jax.models.vision_language import (
  VisionLanguageConfig as VisionLanguageConfig,
)
from coat_jax.models.vision_language import (
  VisionLanguageModel as VisionLanguageModel,
)
