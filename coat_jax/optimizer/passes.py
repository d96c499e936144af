# SPDX-License-Identifier: Apache-2.0
"""Runs a leaf's optimizer step on a GPU in plain JAX, in two or three passes.

A group's statistics depend on all of its values, so a step must read its inputs
twice. XLA would store both new moments in f32 after the first read, and spend
more time on them than on the rest of the step. Here, each pass instead
recomputes the new moments from the stored ones. The last bits of the new
moments may differ between passes, because XLA may fuse multiplications and
additions differently.

The first pass computes the statistics; the last pass encodes the new moments.
If an E4M3 codec with range expansion rounds stochastically, a middle pass
computes drafts, which are codes of values rounded toward zero.

XLA needs about 120 instructions for a power on a GPU, so six powers per
parameter would take longer than all memory accesses. But there are at most 256
values of the expansion's exponent k, and 128 magnitudes of an E4M3 code. So we
look up the decoded values in a table, which gives the same bits. Drafts are
computed in a separate pass because XLA generates slow code if it fuses them
with lookups in this table.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.codecs import factored
from coat_jax.codecs.factored import TILE_COLUMNS, Factored
from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8
from coat_jax.codecs.group import Encoded, Grouped, magnitude_of, share
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import join_groups, split_groups

_SIGN, _NAN = 0x80, 0x7F
_MAGNITUDES = 128  # The number of codes without a sign; the last is NaN.


def can_run(groups: Sequence[Any], shape: tuple[int, ...]) -> bool:
  """Returns whether all codecs have the same group size, and it divides a row.

  The tiles of a factored second moment count as groups.
  """
  if groups[1:] == (Factored(),):
    first = groups[:1]
    return can_run(first, shape) and first[0].group_size == TILE_COLUMNS
  sizes = {getattr(x, "group_size", None) for x in groups}
  return (
    all(isinstance(x, Grouped) for x in groups)
    and len(sizes) == 1
    and bool(shape)
    and shape[-1] % groups[0].group_size == 0
  )


def run(
  groups: Sequence[Grouped],
  compute: Callable[..., tuple[Array, ...]],
  finish: Callable[[Array, Callable[[Array], Array]], Any],
  arrays: Any,
  stored: Sequence[Encoded],
  noise: Sequence[Array | None],
) -> tuple[Any, tuple[Encoded, ...]]:
  """Runs `compute`, passes its result to `finish`, and encodes the moments.

  `compute(arrays, *moments)` returns a result and the new moments, all f32. It
  must be elementwise, because its arguments are split into groups. It may
  broadcast axes of size 1 in `arrays`.
  `finish(result, split)` returns a tree of arrays of the result's shape;
  `split` splits other arrays of the leaf's shape into groups.
  """
  size, n = groups[0].group_size, stored[0].codes.shape[-1]

  def split(x):
    return split_groups(x, size) if x.shape[-1] == n else x[..., None]

  def new(inputs):
    arrays, stored = inputs
    return compute(arrays, *map(_decode, groups, stored))

  # Split first: XLA counts operations before a reshape twice when it estimates
  # the cost of a fusion.
  stored = [
    Encoded(split(codes), *(x[..., None] if x.ndim else x for x in statistics))
    for codes, *statistics in stored
  ]
  inputs = jax.tree.map(split, arrays), stored
  _, *values = new(inputs)
  statistics = [
    codec.statistics(x) for codec, x in zip(groups, values, strict=True)
  ]
  inputs, statistics = lax.optimization_barrier((inputs, statistics))
  result, *values = new(inputs)
  drafts = list(map(_draft, groups, values, statistics))
  if any(draft is not None for draft in drafts):
    inputs, statistics, drafts = lax.optimization_barrier(
      (inputs, statistics, drafts)
    )
    result, *values = new(inputs)
  noise = [None if x is None else split(x) for x in noise]
  encoded = [
    Encoded(join_groups(codes, n), *(x[..., 0] if x.ndim else x for x in rest))
    for codes, *rest in map(_encode, groups, values, noise, statistics, drafts)
  ]
  finished = jax.tree.map(lambda x: join_groups(x, n), finish(result, split))
  return finished, tuple(encoded)


def run_factored(
  groups: tuple[Grouped, Factored],
  compute: Callable[..., tuple[Array, ...]],
  finish: Callable[[Array, Callable[[Array], Array]], Any],
  arrays: Any,
  stored: Sequence[Encoded],
  noise: Sequence[Array | None],
) -> tuple[Any, tuple[Encoded, ...]]:
  """Does the same as `run`, but only reads the second, factored moment."""
  mu, _ = groups
  rows, columns = factored.factors(stored[1])
  row = factored.row_of(rows, columns)

  def of_groups(inputs, first):
    arrays, (rows, columns) = inputs
    columns = factored.spread_over_rows(columns, row, rows.shape[row])
    return compute(arrays, first, factored.product(rows, columns))[:2]

  inputs = arrays, (rows, columns)
  return run([mu], of_groups, finish, inputs, stored[:1], noise)


def _uses_table(codec: Grouped) -> TypeGuard[ExpandedFP8]:
  """Returns whether a codec's decoded values are looked up in a table."""
  # A user's subclass may decode differently.
  is_known = type(codec) in (ExpandedFP8, BoundedFP8)
  return is_known and isinstance(codec, ExpandedFP8) and codec.dtype == E4M3


def _decode(codec: Grouped, encoded: Encoded) -> Array:
  if not _uses_table(codec):
    return codec.decode_groups(encoded)
  codes, *statistics = encoded
  code = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)
  t = _contract(codec, code & _NAN, *statistics)
  magnitude = t * codec.bound(encoded.amax)
  return jnp.where(code >= _SIGN, -magnitude, magnitude)


def _draft(
  codec: Grouped, x: Array, statistics: tuple[Array, Array]
) -> Array | None:
  """Rounds x toward zero to uint8 codes; None if `_encode` needs no draft."""
  if not (_uses_table(codec) and codec.needs_noise):
    return None
  t = share(magnitude_of(x), codec.bound(statistics[0]))
  y = codec.expand(t, *statistics)
  # E4M3 has 3 mantissa bits and exponent bias 7; f32's bias is 127. E4M3 values
  # below 2^-6 are multiples of 2^-9. If 2^23 is added to a smaller integer, the
  # last bits of the f32 are that integer.
  bits = lax.bitcast_convert_type(y, jnp.uint32)
  steps = jnp.floor(y * 2.0**9) + 2.0**23
  subnormal = lax.bitcast_convert_type(steps, jnp.uint32) & 0xF
  code = jnp.where(y < 2.0**-6, subnormal, (bits >> 20) - ((127 - 7) << 3))
  code = jnp.where(jnp.isnan(y), _NAN, code)
  return jnp.where(x < 0, code | _SIGN, code).astype(jnp.uint8)


def _encode(
  codec: Grouped,
  x: Array,
  noise: Array | None,
  statistics: tuple[Array, Array],
  draft: Array | None,
) -> Encoded:
  if not _uses_table(codec) or draft is None or noise is None:
    return codec.encode_groups(x, noise, statistics)
  t = share(magnitude_of(x), codec.bound(statistics[0]))
  code = draft.astype(jnp.uint32)
  below = _contract(codec, code & _NAN, *statistics)
  # The code after the largest value is NaN, which is never chosen.
  above = _contract(codec, (code & _NAN) + 1, *statistics)
  is_up = t - below > noise * (above - below)
  code = (code + is_up.astype(jnp.uint32)).astype(jnp.uint8)
  return Encoded(lax.bitcast_convert_type(code, codec.dtype), *statistics)


def _contract(
  codec: ExpandedFP8, code: Array, amax: Array, range_: Array
) -> Array:
  """Looks up |value| / bound for uint32 codes without a sign."""
  codes = lax.iota(jnp.uint8, _MAGNITUDES)
  y = lax.bitcast_convert_type(codes, codec.dtype).astype(jnp.float32)[None]
  # Each of the 256 roots 1/k has a row. `_encode` may look up the code after
  # NaN, which is the first entry of the next row, so there is one more row.
  root = codec.root_at(lax.iota(jnp.float32, 257)[:, None])
  # Without the barrier, XLA may compute a power for each lookup.
  table = lax.optimization_barrier(codec.contract(y, root).reshape(-1))
  row = codec.root_index(amax, range_).astype(jnp.uint32)
  return lax.gather(
    table,
    (row * _MAGNITUDES + code)[..., None],
    lax.GatherDimensionNumbers((), (0,), (0,)),
    slice_sizes=(1,),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
