# SPDX-License-Identifier: Apache-2.0
"""What operations take, give and raise beside `QTensor`s and arrays."""

import dataclasses
from typing import Literal, NamedTuple

from jax import Array

from coat_jax.checks import COUNT, POSITIVE, check_number, check_whole

# "xla" is the definition in plain jnp; the others are for a GPU, "cuda" in jnp.
Implementation = Literal[
  "xla", "triton", "mosaic", "jax_triton", "cublas", "cudnn", "cuda"
]
# Those of the optimizers' steps.
StepImplementation = Literal["xla", "mosaic"]

Layout = Literal["rows", "columns", "both"]

NormKind = Literal["rms", "layer"]

# SiLU, and GELU by its tanh approximation or by erf.
Activation = Literal["silu", "gelu_tanh", "gelu"]

# GELU by the tanh formula (True), by erf (False), or as x sigmoid(1.702 x), the
# "quick GELU" of CLIP.
Approximation = bool | Literal["sigmoid"]


class Unsupported(NotImplementedError):
  """Raised by an implementation that cannot take these arguments: why not."""


class BlockScales(NamedTuple):
  """Scales of an operand in blocks of 128; each layout has its own.

  f32 powers of two. An activation or a gradient has one per 1 x 128 values of
  what a product sums over, a weight one per tile of 128 x 128; last blocks may
  be short. `ops.blocks` quantizes so.

  Attributes:
    rows: of `Operand.rows` [..., n]: [..., ceil(n / 128)]; of a weight's
      [ceil(m / 128), ceil(n / 128)].
    columns: of `Operand.columns` [n, m], likewise.
  """

  rows: Array | None
  columns: Array | None


class Operand(NamedTuple):
  """A matrix in FP8 with its scales, laid out for the products that read it.

  FP8 matrix products on Hopper want both operands with the axis that is summed
  over last. So a matrix that is summed over its rows is transposed where it is
  quantized: transposing FP8 codes later costs another pass.

  Attributes:
    rows: FP8 [..., n], or None where no product reads it so.
    columns: FP8 [n, m], m the number of rows (all axes but the last), or None.
    scale: f32 scalar, x ≈ rows * scale; or `BlockScales`, and then columns are
      no transpose of rows but quantized in blocks of their own.
  """

  rows: Array | None
  columns: Array | None
  scale: Array | BlockScales


class NormStats(NamedTuple):
  """What a norm's backward needs beside its input: f32 [...], one per row."""

  mean: Array | None
  rstd: Array


@dataclasses.dataclass(frozen=True)
class AttentionKind:
  """Which keys a query sees, and what a score is.

  Attributes:
    causal: query t sees keys up to t + S - T; T may not be above S.
    window: of these only the last so many, its own among them: keys with
      query - window < key, `sliding_window` in transformers; None for all.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves
      them as they are.
    scale: what q k^T is multiplied by; None for 1 / sqrt(H).
  """

  causal: bool = True
  window: int | None = None
  soft_cap: float | None = None
  scale: float | None = None

  def __post_init__(self):
    op = "attention"
    if self.window is not None:
      remedy = "a query sees itself, and window=None is for all keys"
      check_whole(op, "window", self.window, COUNT, remedy)
    if self.window is not None and not self.causal:
      raise ValueError(
        "attention: a window ends at its query and needs causal=True, got "
        f"window={self.window} and causal=False; leave one of them out"
      )
    for name in ("soft_cap", "scale"):
      value = getattr(self, name)
      if value is not None:
        remedy = f"pass {name}=None for none of your own"
        check_number(op, name, value, POSITIVE, remedy)

  def among(self, keys: int) -> "AttentionKind":
    """The same for so many keys: a window as long sees all of them."""
    if self.window is None or self.window < keys:
      return self
    return dataclasses.replace(self, window=None)

  def scale_of(self, head_dim: int) -> float:
    """What q k^T is multiplied by."""
    return head_dim**-0.5 if self.scale is None else self.scale


class AttentionResiduals(NamedTuple):
  """What attention's backward reads beside q, k and v.

  Attributes:
    out: [B, T, N, H], the output.
    lse: f32 [B, T, N], log-sum-exp of each query's scores, which are scaled
      and capped.
  """

  out: Array
  lse: Array
