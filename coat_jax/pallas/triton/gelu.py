# SPDX-License-Identifier: Apache-2.0
"""GELU from and to FP8: `ops.gelu_input` and others.

  gelu_input         codes and scales of x, amax of y
  gelu_fwd           y = gelu(x), by rows, by columns or both
  gelu_bwd_operands  dx = dy gelu'(x) in both layouts, and y's columns

Tiles and passes are as in `gated`. The second pass also sums a bias's gradient:
each tile writes the sum of its rows, and XLA adds those up, always in the same
order. The kernels take a third of XLA's time (H200, jax 0.11.2, [8192, 11008]).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  GRADIENTS,
  VALUES,
  Groups,
  Layout,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import Approximation
from coat_jax.pallas.triton import activations, matrix, supported, tiles
from coat_jax.pallas.triton.activations import Function
from coat_jax.pallas.triton.matrix import Matrix
from coat_jax.pallas.triton.scales import bits_to_shared_scale, output_scale


def _function(approximate: Approximation) -> Function:
  return "gelu_quick" if approximate == "sigmoid" else "gelu_tanh"


def _why_not_formula(approximate: Approximation) -> str | None:
  if approximate:
    return None
  return (
    "the Triton kernel supports the tanh and sigmoid approximations, since "
    "Pallas cannot lower erf to Triton; got approximate=False"
  )


# --- Input -------------------------------------------------------------------


def _why_not_input(x, approximate, groups, output, **_) -> str | None:
  return _why_not_formula(approximate) or supported.why_not_read(
    x, x.shape, groups, output
  )


@kernel(_why_not_input)
@jax.jit(static_argnames=("approximate", "groups", "output", "interpret"))
def gelu_input(
  x: Array,
  *,
  approximate: Approximation,
  groups: Groups,
  output: Scaling = VALUES,
  interpret: bool = False,
) -> tuple[QTensor, Array | None]:
  """`ops.gelu_input`."""
  n = x.shape[-1]
  m = x.size // n
  whole = Matrix(m, n, matrix.pick_row_tile(m, n), interpret, groups.size)
  codes, scale, bits = whole.run(
    functools.partial(
      activations.input_kernel, function=_function(approximate)
    ),
    [whole.values(x)],
    [whole.values(E4M3), whole.scales(jnp.bfloat16), whole.maxima()],
    name="gelu_input",
  )
  return (
    whole.grouped(codes, scale, x.shape),
    output_scale(bits, output, interpret),
  )


# --- Forward -----------------------------------------------------------------


def _why_not_fwd(x, approximate, output, scale, layout, **_) -> str | None:
  return (
    _why_not_formula(approximate)
    or supported.why_not_values(x)
    or supported.why_not_written(x.qvalue.shape, output, scale, layout)
  )


@kernel(_why_not_fwd)
@jax.jit(static_argnames=("approximate", "output", "layout", "interpret"))
def gelu_fwd(
  x: QTensor,
  *,
  approximate: Approximation,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
  interpret: bool = False,
) -> Operand:
  """`ops.gelu_fwd`."""
  assert isinstance(scale, Array)
  whole = matrix.of_values(x, layout, interpret)
  rows, columns = whole.run(
    functools.partial(activations.fwd_kernel, function=_function(approximate)),
    [*whole.quantized(x), matrix.scalar(scale)],
    whole.operand(E4M3, layout),
    name="gelu_fwd",
  )
  return Operand(matrix.like(rows, x.qvalue), columns, scale)


# --- Backward ----------------------------------------------------------------


def _why_not_bwd(
  dy, x, approximate, gradient, output, scale, **_
) -> str | None:
  if dy.shape != x.qvalue.shape:
    return f"dy must have x's shape {x.qvalue.shape}, got {dy.shape}"
  return (
    supported.why_not_scaling(gradient, E5M2)
    or _why_not_formula(approximate)
    or supported.why_not_dtype(dy.dtype)
    or supported.why_not_values(x)
    or supported.why_not_written(dy.shape, output, scale, "both")
  )


@kernel(_why_not_bwd)
@jax.jit(
  static_argnames=("approximate", "gradient", "output", "has_sums", "interpret")
)
def gelu_bwd_operands(
  dy: Array,
  x: QTensor,
  *,
  approximate: Approximation,
  gradient: Scaling = GRADIENTS,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  has_sums: bool = False,
  interpret: bool = False,
) -> tuple[Operand, Operand, Array | None]:
  """`ops.gelu_bwd_operands`, in two passes."""
  assert isinstance(scale, Array)
  function = _function(approximate)
  whole = matrix.of_values(x, "rows", interpret)
  [bits] = whole.run(
    functools.partial(_amax_kernel, function=function),
    [whole.values(dy), *whole.quantized(x)],
    [whole.maxima()],
    name="gelu_bwd_amax",
  )
  dx_scale, read = bits_to_shared_scale(bits, gradient, interpret)
  whole = matrix.of_values(x, "both", interpret)
  rows, columns, y, sums = whole.run(
    functools.partial(_bwd_kernel, function=function),
    [
      whole.values(dy),
      *whole.quantized(x),
      matrix.scalar(read),
      matrix.scalar(scale),
    ],
    [
      *whole.operand(E5M2, "both"),
      whole.columns(E4M3),
      whole.sums() if has_sums else None,
    ],
    name="gelu_bwd_operands",
  )
  if sums is not None:
    sums = jnp.sum(sums, axis=0)
  dx = Operand(matrix.like(rows, dy), columns, dx_scale)
  return dx, Operand(None, y, scale), sums


def _amax_kernel(whole, *refs, function):
  *refs, bits_ref = refs
  dx, _ = _gradient_values(whole, refs, function)
  tiles.store_scalar(bits_ref, tiles.amax_bits(dx))


def _gradient_values(whole, refs, function) -> tuple[Array, Array]:
  """Returns dx and y of a tile, zeros outside the matrix."""
  dy_ref, q_ref, scales_ref = refs
  x = whole.load_groups(q_ref, scales_ref)
  share, derivative = activations.gelu_share_and_derivative(
    x, function, whole.interpret
  )
  return whole.load(dy_ref) * derivative, x * share


def _bwd_kernel(whole, *refs, function):
  *refs, rows_ref, columns_ref, output_ref, sums_ref = refs
  *refs, scale_ref, output_scale_ref = refs
  dx, y = _gradient_values(whole, refs, function)
  if sums_ref is not None:
    whole.store_sums(sums_ref, dx)
  codes = whole.quantize(dx, scale_ref, E5M2)
  whole.store_operand(rows_ref, columns_ref, codes)
  codes = whole.quantize(y, output_scale_ref, E4M3)
  whole.store_operand(None, output_ref, codes)
