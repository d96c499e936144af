# SPDX-License-Identifier: Apache-2.0
"""How much memory a training step takes on each GPU, before there is one.

Nothing is compiled: weights, gradients and the optimizer's state are added up
from shapes and shardings, what layers save and what a step needs for a moment
from the formulas of this package. docs/plan.md says what is counted, and
how far it is from XLA's own count.

A step is fullest at one of a few moments, each with what is alive then:

  loss       all that layers save, and a chunk of logits
  backward   all that layers save, the layers' gradients, and the arrays of
             the one layer that is being differentiated
  embedding  all gradients, the embedding's not yet summed; the optimizer, which
             works in place, needs no more
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
