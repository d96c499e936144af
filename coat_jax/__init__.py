# SPDX-License-Identifier: Apache-2.0
"""FP8 training for JAX that saves memory: optimizer states and activations.

The optimizers are here; the layers are in `coat_jax.layers`:

  import coat_jax
  from coat_jax import (codecs, layers, recipe)

  optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.coat())
  mlp = layers.GatedMLP(4096, 11008, recipe=recipe.coat(), rngs=nnx.Rngs(0))
"""

from coat_jax import codecs as codecs
from coat_jax import recipe as recipe
from coat_jax.codecs import MomentCodec as MomentCodec
from coat_jax.formats import E4M3 as E4M3
from coat_jax.formats import E5M2 as E5M2
from coat_jax.optax_coat import ScaleByCoatAdamState as ScaleByCoatAdamState
from coat_jax.optax_coat import apply_updates as apply_updates
from coat_jax.optax_coat import coat_adamw as coat_adamw
from coat_jax.optax_coat import scale_by_coat_adam as scale_by_coat_adam
from coat_jax.optimizer.clipping import Clipping as Clipping
from coat_jax.optimizer.clipping import ClipState as ClipState
from coat_jax.optimizer.conversion import from_adam_state as from_adam_state
from coat_jax.optimizer.conversion import from_plain_state as from_plain_state
from coat_jax.optimizer.conversion import to_adam_state as to_adam_state
from coat_jax.optimizer.conversion import to_plain_state as to_plain_state
from coat_jax.optimizer.encoded import encoded as encoded
from coat_jax.optimizer.fields import default_field_rule as default_field_rule
from coat_jax.optimizer.fused import fused_coat_adamw as fused_coat_adamw
from coat_jax.optimizer.fused import fused_coat_lion as fused_coat_lion
from coat_jax.optimizer.fused_transformation import (
  FusedTransformation as FusedTransformation,
)
from coat_jax.optimizer.in_backward import BackwardStep as BackwardStep
from coat_jax.optimizer.in_backward import step_in_backward as step_in_backward
from coat_jax.optimizer.leafwise import leafwise as leafwise
from coat_jax.optimizer.lion import coat_lion as coat_lion
from coat_jax.optimizer.lion import scale_by_coat_lion as scale_by_coat_lion
from coat_jax.optimizer.masks import (
  default_quantize_mask as default_quantize_mask,
)
from coat_jax.optimizer.masks import is_norm_or_bias as is_norm_or_bias
from coat_jax.optimizer.matrices import MatrixSplit as MatrixSplit
from coat_jax.optimizer.matrices import hidden_matrices as hidden_matrices
from coat_jax.optimizer.muon import coat_muon as coat_muon
from coat_jax.optimizer.muon import scale_by_coat_muon as scale_by_coat_muon
from coat_jax.optimizer.report import state_bytes as state_bytes
from coat_jax.optimizer.report import state_report as state_report
from coat_jax.optimizer.serialization import check_stored as check_stored
from coat_jax.optimizer.serialization import from_integers as from_integers
from coat_jax.optimizer.serialization import to_integers as to_integers
from coat_jax.optimizer.state import EncodedState as EncodedState
from coat_jax.optimizer.state import LowBitsState as LowBitsState
from coat_jax.optimizer.state import Moment as Moment
from coat_jax.optimizer.state import (
  ScaleByCoatLionState as ScaleByCoatLionState,
)
from coat_jax.optimizer.state import (
  ScaleByCoatMuonState as ScaleByCoatMuonState,
)
from coat_jax.optimizer.weights import SplitWeight as SplitWeight
from coat_jax.optimizer.weights import join_weights as join_weights
from coat_jax.optimizer.weights import split_weights as split_weights
from coat_jax.qtensor import QTensor as QTensor
from coat_jax.qtensor import dequantize as dequantize
from coat_jax.qtensor import quantize as quantize
from coat_jax.recipe import CoatRecipe as CoatRecipe
from coat_jax.recipe import Formats as Formats
from coat_jax.recipe import MeshAxes as MeshAxes

__version__ = "0.1.0"
