# SPDX-License-Identifier: Apache-2.0
"""Vision towers: encoders of images, of the blocks that decoders have.

config  `VisionConfig`, the shape of a tower
embed   pixels to the input of the first layer
tower   `VisionTower`: layers, and what reads their output
pool    one vector an image
"""

from coat_jax.models.vision.config import VISION_FAMILIES as VISION_FAMILIES
from coat_jax.models.vision.config import VisionConfig as VisionConfig
from coat_jax.models.vision.tower import VisionLayer as VisionLayer
from coat_jax.models.vision.tower import VisionTower as VisionTower
