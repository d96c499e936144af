# SPDX-License-Identifier: Apache-2.0
"""Optimizers with FP8 states, and tools to convert, shard and report states."""

from coat_jax.optimizer.clipping import Clipping as Clipping
from coat_jax.optimizer.clipping import ClipState as ClipState
from coat_jax.optimizer.conversion import from_plain_state as from_plain_state
from coat_jax.optimizer.conversion import to_plain_state as to_plain_state
from coat_jax.optimizer.encoded import encoded as encoded
from coat_jax.optimizer.fields import default_field_rule as default_field_rule
from coat_jax.optimizer.fused import FusedTransformation as FusedTransformation
from coat_jax.optimizer.fused import fused_coat_adamw as fused_coat_adamw
from coat_jax.optimizer.fused import fused_coat_lion as fused_coat_lion
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
from coat_jax.optimizer.sharding import abstract_state as abstract_state
from coat_jax.optimizer.sharding import fit_group_size as fit_group_size
from coat_jax.optimizer.sharding import state_shardings as state_shardings
from coat_jax.optimizer.state import EncodedState as EncodedState
from coat_jax.optimizer.state import LowBitsState as LowBitsState
from coat_jax.optimizer.state import Moment as Moment
from coat_jax.optimizer.state import (
  ScaleByCoatAdamState as ScaleByCoatAdamState,
)
from coat_jax.optimizer.state import (
  ScaleByCoatLionState as ScaleByCoatLionState,
)
from coat_jax.optimizer.state import (
  ScaleByCoatMuonState as ScaleByCoatMuonState,
)
from coat_jax.optimizer.weights import SplitWeight as SplitWeight
from coat_jax.optimizer.weights import (
  StochasticRoundingState as StochasticRoundingState,
)
from coat_jax.optimizer.weights import join_weights as join_weights
from coat_jax.optimizer.weights import split_weights as split_weights
from coat_jax.optimizer.weights import (
  stochastic_rounding as stochastic_rounding,
)
