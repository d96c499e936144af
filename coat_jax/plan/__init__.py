# SPDX-License-Identifier: Apache-2.0
"""Plans how much memory a training step takes on each GPU before it runs.

Nothing is compiled. The sizes of weights, gradients and optimizer state follow
from shapes and shardings; formulas in this package give what layers save and
what a step needs temporarily. docs/plan.md describes what is counted, and how
far the result is from XLA's own count.

Peak memory occurs at one of these points, each with what is alive then:

  loss       everything that layers save, and a chunk of logits
  backward   everything that layers save, the layers' gradients, and the arrays
             of the one layer that is being differentiated
  embedding  all gradients, the embedding's not yet summed; the optimizer works
             in place and needs no more
"""

from coat_jax.plan.decoder import DecoderShape as DecoderShape
from coat_jax.plan.decoder import Load as Load
from coat_jax.plan.decoder import kept_bytes as kept_bytes
from coat_jax.plan.step import Memory as Memory
from coat_jax.plan.step import device_bytes as device_bytes
from coat_jax.plan.step import fullest as fullest
from coat_jax.plan.step import largest_batch as largest_batch
from coat_jax.plan.step import plan_step as plan_step
from coat_jax.plan.vision import Images as Images
from coat_jax.plan.vision import plan_vision_step as plan_vision_step
