# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of queries and keys, after their projection and before RoPE.

FP8 blocks save this norm's inputs as FP8 codes. The forward and backward passes
both compute q and k from these codes. So the recomputed scores match the
log-sum-exp that the forward pass saved.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

from jax import Array, P

from coat_jax import ops
from coat_jax.layers.residuals import cotangent
from coat_jax.mesh import sum_tokens
from coat_jax.numerics.checks import NOT_NEGATIVE, check_choice, check_number
from coat_jax.recipes import MeshAxes

NormedOver = Literal["head", "all"]


class QKNormWeights(NamedTuple):
  """Weights of the norms of q and k.

  Attributes:
    q: [H] if each head is normalized separately; [N H], concatenated over
      heads, if all heads are normalized together.
    k: [H] or [K H].
  """

  q: Array
  k: Array


@dataclasses.dataclass(frozen=True)
class QKNorm:
  """x / sqrt(mean(x^2) + eps) * weight for heads x [B, T, N, H].

  Attributes:
    over: which channels are averaged: "head" for the H channels of each head,
      as in Qwen3; "all" for all N H channels of a token, as in OLMo 2.
    eps: added to the mean of x^2.

  Raises:
    TypeError: `eps` is not a number.
    ValueError: `over` is unknown, or `eps` is negative.
  """

  over: NormedOver
  eps: float

  def __post_init__(self):
    check_choice("QKNorm", "over", self.over, get_args(NormedOver))
    check_number("QKNorm", "eps", self.eps, NOT_NEGATIVE, "1e-6 is usual")

  def normalized(
    self, x: Array, weight: Array, axes: MeshAxes | None = None
  ) -> Array:
    """Normalizes x in f32; with mesh axes, x has only the device's heads."""
    return self._values(self._rows(x), weight, axes)[0].reshape(x.shape)

  def gradients(
    self, dy: Array, x: Array, weight: Array, axes: MeshAxes | None
  ) -> tuple[Array, Array]:
    """Returns dx in f32, and dweight, summed over tokens, in weight's dtype."""
    rows = self._rows(x)
    _, stats = self._values(rows, weight, axes)
    names = self._axis_names(axes)
    dx, dweight, _ = ops.norm_gradients(
      self._rows(dy), rows, weight, stats, axis_names=names
    )
    # With "all", each device holds only the part of the weight for its heads.
    dweight = sum_tokens(dweight, axes, all_positions=self.over == "all")
    return dx.reshape(x.shape), cotangent(dweight, weight)

  def spec(self, axes: MeshAxes) -> P:
    """Returns the spec of each weight: split like the heads, or replicated."""
    return P() if self.over == "head" else P(axes.tensor)

  def _rows(self, x):
    b, t, n, h = x.shape
    return x if self.over == "head" else x.reshape(b, t, n * h)

  def _values(self, rows, weight, axes):
    return ops.norm_values(
      rows,
      weight,
      None,
      kind="rms",
      eps=self.eps,
      axis_names=self._axis_names(axes),
    )

  def _axis_names(self, axes):
    """Returns the mesh axes that split each row into shards of equal size."""
    if self.over == "head" or axes is None or axes.tensor is None:
      return ()
    return (axes.tensor,)
