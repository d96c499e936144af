# SPDX-License-Identifier: Apache-2.0
"""Attention with FP8 products in layers: scales found just in time.

Those of q, k, v and of the output's gradient are of the arrays themselves. The
backward quantizes dq, dk, dv and dS too, inside the kernel, where nobody knows
yet how large they will be. So they are first guessed, from norms of what the
kernel reads, with room above. The kernel says what the largest magnitudes were;
where one is larger than its guess, which clips, or more than 2^7 below, which
costs precision, the kernel runs again with scales of what it said. E4M3 has
2^14.8 between its largest and its smallest normal value, so most guesses do.

On a mesh a tensor is all of its shards, so that all devices decide alike.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.formats import E4M3, qmax
from coat_jax.layers.mesh.collectives import scale_axes
from coat_jax.ops import (
  AttentionKind,
  FP8AttentionResiduals,
  GradientScales,
)
from coat_jax.qtensor import (
  QTensor,
  amax_to_scale,
  dequantize,
  tensor_amax,
)
from coat_jax.recipe import CoatRecipe

# A guess is accepted from the largest magnitude to so many times it.
ROOM = 2.0**7


def per_tensor(x: Array | QTensor, recipe: CoatRecipe) -> QTensor:
  """Codes with one scale, as products of attention read them; theirs as is."""
  if isinstance(x, QTensor):
    return x
  codes = ops.quantize_tensor(
    x,
    axis_names=scale_axes(recipe.axes),
    implementation=recipe.implementation,
  )
  assert codes.rows is not None and isinstance(codes.scale, Array)
  return QTensor(codes.rows, codes.scale)


def fp8_attention_backward(
  dout: Array,
  q: QTensor,
  k: QTensor,
  v: QTensor,
  residuals: FP8AttentionResiduals,
  segments: Array | None,
  *,
  kind: AttentionKind,
  recipe: CoatRecipe,
  dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
  """dq, dk, dv in `dtype`; see above.

  Args:
    dout: [B, T, N, H].
    q, k, v, segments: what `ops.attention_fp8_fwd` had.
    residuals: what it returned.
    kind: as of it.
    recipe: its implementation.
    dtype: of the results.
  """
  g, axis_names = per_tensor(dout, recipe), scale_axes(recipe.axes)
  largest_of_all = functools.partial(tensor_amax, axis_names=axis_names)
  run = functools.partial(
    ops.attention_fp8_bwd, kind=kind, implementation=recipe.implementation
  )

  def backward(largest: GradientScales):
    scales = GradientScales(*(amax_to_scale(x) for x in largest))
    codes, found = run(g, q, k, v, residuals, scales, segments)
    return codes, GradientScales(*map(largest_of_all, found))

  guess = guess_largest(g, q, k, v, kind, axis_names)
  first, found = backward(guess)
  # Of clipped dS dq and dk are too small.
  clipped = jnp.where(found.ds > guess.ds, found.ds / guess.ds, 1)
  right = GradientScales(
    found.dq * clipped, found.dk * clipped, found.dv, found.ds
  )
  codes = jax.lax.cond(
    _fits(guess, found), lambda: first, lambda: backward(right)[0]
  )
  dq, dk, dv = (dequantize(x, group_size=None, dtype=dtype) for x in codes)
  return dq, dk, dv


def guess_largest(
  dout: QTensor,
  q: QTensor,
  k: QTensor,
  v: QTensor,
  kind: AttentionKind,
  axis_names: tuple[str, ...],
) -> GradientScales:
  """What the largest magnitudes of the backward may be.

  |dout v| is at most the product of norms. A row of P (dout v^T - delta) is
  then at most half of that, where P has two values of 1/2; a fourth of it is
  taken. dq and dk are sums of rows of k and q with dS, of both signs. dv is a
  sum of rows of dout over all queries that see a key: up to T of them, but of
  random signs. The factors leave 2 to 30 times of room over random inputs,
  peaked scores, keys that all queries see, and neighbours that do.
  """
  heads = q.qvalue.shape[2] / k.qvalue.shape[2]
  norms = _norm(dout, axis_names) * _norm(v, axis_names)
  product = kind.scale_of(q.qvalue.shape[-1]) * norms
  return GradientScales(
    dq=product * _amax(k) / 16,
    dk=product * _amax(q) * heads**0.5 / 16,
    dv=32 * heads**0.5 * _amax(dout),
    ds=product / 8,
  )


def _norm(x: QTensor, axis_names: tuple[str, ...]) -> Array:
  """The largest norm of a head's vectors."""
  squares = jnp.sum(jnp.square(x.qvalue.astype(jnp.float32)), axis=-1)
  return jnp.sqrt(tensor_amax(squares, axis_names=axis_names)) * x.scale


def _amax(x: QTensor) -> Array:
  """The largest magnitude, which the scale was made of."""
  return x.scale * qmax(E4M3)


def _fits(guess: GradientScales, found: GradientScales) -> Array:
  """Whether all are in the range that scales of the guess serve well."""
  fits = jnp.bool(True)
  for most, x in zip(guess, found, strict=True):
    fits &= (x <= most) & ((x * ROOM >= most) | (x == 0))
  return fits
