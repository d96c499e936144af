# SPDX-License-Identifier: Apache-2.0
"""FP8 training for JAX, with less memory for optimizer states and activations.

This module exports optimizers for optax. `coat_jax.optimizer` adds fused
optimizers, and functions that report and convert optimizer states.
`coat_jax.layers` contains Flax layers:

  import coat_jax
  from coat_jax import codecs, layers, recipes
  from flax import nnx

  optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.coat())
  mlp = layers.MLP(4096, 11008, recipe=recipes.coat(), rngs=nnx.Rngs(0))
"""

from coat_jax import codecs as codecs
from coat_jax import recipes as recipes
from coat_jax.codecs import MomentCodec as MomentCodec
from coat_jax.optax_coat import apply_updates as apply_updates
from coat_jax.optax_coat import coat_adamw as coat_adamw
from coat_jax.optax_coat import scale_by_coat_adam as scale_by_coat_adam
from coat_jax.optimizer.encoded import encoded as encoded
from coat_jax.optimizer.lion import coat_lion as coat_lion
from coat_jax.optimizer.lion import scale_by_coat_lion as scale_by_coat_lion
from coat_jax.optimizer.muon import coat_muon as coat_muon
from coat_jax.optimizer.muon import scale_by_coat_muon as scale_by_coat_muon
from coat_jax.recipes import CoatRecipe as CoatRecipe
from coat_jax.recipes import MeshAxes as MeshAxes

__version__ = "0.1.0"
