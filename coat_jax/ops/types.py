# SPDX-License-Identifier: Apache-2.0
"""What operations take, give and raise beside `QTensor`s and arrays."""

from typing import Literal, NamedTuple

from jax import Array

# "xla" is the definition in plain jnp; the others are for a GPU.
Implementation = Literal["xla", "triton", "mosaic", "cublas", "cudnn"]

Layout = Literal["rows", "columns", "both"]

NormKind = Literal["rms", "layer"]

# SiLU, and GELU by its tanh approximation or by erf.
Activation = Literal["silu", "gelu_tanh", "gelu"]


class Unsupported(NotImplementedError):
  """Raised by an implementation that cannot take these arguments: why not."""


class Operand(NamedTuple):
  """A matrix in FP8 with one scale, laid out for the products that read it.

  FP8 matrix products on Hopper want both operands with the axis that is summed
  over last. So a matrix that is summed over its rows is transposed where it is
  quantized: transposing FP8 codes later costs another pass.

  Attributes:
    rows: FP8 [..., n], or None where no product reads it so.
    columns: FP8 [n, m], m the number of rows (all axes but the last), or None.
    scale: f32 scalar, x ≈ rows * scale.
  """

  rows: Array | None
  columns: Array | None
  scale: Array


class NormStats(NamedTuple):
  """What a norm's backward needs beside its input: f32 [...], one per row."""

  mean: Array | None
  rstd: Array


class AttentionResiduals(NamedTuple):
  """What attention's backward reads beside q, k and v.

  Attributes:
    out: [B, T, N, H], the output.
    lse: f32 [B, T, N], log-sum-exp of the scaled scores of each query.
  """

  out: Array
  lse: Array
