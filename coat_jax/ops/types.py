# SPDX-License-Identifier: Apache-2.0
"""Types that operations accept and return, and the error that they raise."""

import dataclasses
from typing import Literal, NamedTuple

from jax import Array

from coat_jax.numerics.checks import (
  COUNT,
  POSITIVE,
  check_flags,
  check_number,
  check_whole,
)

# Implementations of the optimizers' steps.
StepImplementation = Literal["xla", "mosaic", "mosaic_tpu"]

NormKind = Literal["rms", "layer"]

# "gelu" is exact (erf), "gelu_tanh" is the tanh approximation, and "gelu_quick"
# is x sigmoid(1.702 x), the "quick GELU" of CLIP.
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick"]


class Unsupported(NotImplementedError):
  """Raised, with a reason, if an implementation does not support a call."""


class NormStats(NamedTuple):
  """Statistics that a norm's backward pass reads along with the norm's input.

  `mean` and `rstd` are f32 [...], one value per row. For "rms", `mean` is None.
  """

  mean: Array | None
  rstd: Array


@dataclasses.dataclass(frozen=True)
class AttentionKind:
  """Specifies which keys a query sees, and how scores are scaled and capped.

  Attributes:
    causal: with T queries and S >= T keys, query t sees keys 0 to t + S - T.
    window: of the keys that `causal` allows, a query sees only the last
      `window`, including the key at its own position; None for all. Hugging
      Face Transformers calls this `sliding_window`.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves
      them unchanged.
    scale: factor that multiplies q k^T; None for 1 / sqrt(H), with head size H.
  """

  causal: bool = True
  window: int | None = None
  soft_cap: float | None = None
  scale: float | None = None

  def __post_init__(self):
    op = "attention"
    check_flags(op, causal=self.causal)
    if self.window is not None:
      remedy = "a window includes the query's own key; pass None for no window"
      check_whole(op, "window", self.window, COUNT, remedy)
    if self.window is not None and not self.causal:
      raise ValueError(
        "attention: a window ends at its query and needs causal=True, got "
        f"window={self.window} and causal=False; leave one of them out"
      )
    for name in ("soft_cap", "scale"):
      value = getattr(self, name)
      if value is not None:
        remedy = f"leave {name} out for the default"
        check_number(op, name, value, POSITIVE, remedy)

  def among(self, keys: int) -> "AttentionKind":
    """Drops the window if it covers all keys; `keys` is their number."""
    if self.window is None or self.window < keys:
      return self
    return dataclasses.replace(self, window=None)

  def scale_of(self, head_dim: int) -> float:
    """Returns the factor that multiplies q k^T."""
    return head_dim**-0.5 if self.scale is None else self.scale


class AttentionResiduals(NamedTuple):
  """Arrays that attention's backward pass reads in addition to q, k and v.

  Attributes:
    out: [B, T, N, H], the output.
    lse: f32 [B, T, N], log-sum-exp of each query's scaled, capped scores.
  """

  out: Array
  lse: Array
