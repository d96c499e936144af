# SPDX-License-Identifier: Apache-2.0
"""Vision towers: image encoders that are built of the decoders' blocks.

config  `VisionConfig`, the shape of a tower
embed   turns pixels into the input of the first layer
tower   `VisionTower`: the layers, and what reads their output
pool    computes one vector per image
"""

from coat_jax.models.vision.config import VISION_FAMILIES as VISION_FAMILIES
from coat_jax.models.vision.config import VisionConfig as VisionConfig
from coat_jax.models.vision.tower import VisionLayer as VisionLayer
from coat_jax.models.vision.tower import VisionTower as VisionTower
