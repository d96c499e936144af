# SPDX-License-Identifier: Apache-2.0
"""Decoders, vision towers and vision-language models, made of COAT's layers.

`ModelConfig` describes a decoder: its sizes, and the name of its family in
`FAMILIES`. `VisionConfig` describes a vision tower. `load_hf` and `save_hf`
read and write Hugging Face checkpoints.
"""

from coat_jax.models.batch import Batch as Batch
from coat_jax.models.config import FAMILIES as FAMILIES
from coat_jax.models.config import Family as Family
from coat_jax.models.config import ModelConfig as ModelConfig
from coat_jax.models.config import Remat as Remat
from coat_jax.models.decoder import Decoder as Decoder
from coat_jax.models.generate import Generation as Generation
from coat_jax.models.generate import generate as generate
from coat_jax.models.hf.load import load_hf as load_hf
from coat_jax.models.hf.save import save_hf as save_hf
from coat_jax.models.layer import TransformerLayer as TransformerLayer
from coat_jax.models.loss import loss_fn as loss_fn
from coat_jax.models.params import model_matrices as model_matrices
from coat_jax.models.params import param_shardings as param_shardings
from coat_jax.models.rope import parse_scaling as parse_scaling
from coat_jax.models.vision.config import VISION_FAMILIES as VISION_FAMILIES
from coat_jax.models.vision.config import VisionConfig as VisionConfig
from coat_jax.models.vision.tower import VisionTower as VisionTower
from coat_jax.models.vision_language import Projector as Projector
from coat_jax.models.vision_language import (
  VisionLanguageConfig as VisionLanguageConfig,
)
from coat_jax.models.vision_language import (
  VisionLanguageModel as VisionLanguageModel,
)
