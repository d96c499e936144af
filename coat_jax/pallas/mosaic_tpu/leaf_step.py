# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a leaf with encoded moments, in one pass over memory.

This is `step.step_of` as a Pallas kernel for TPUs. A group fills the 128 lanes
of a register, so the kernel needs no formulas of its own: it calls the codec's
and the optimizer's definitions on tiles of [rows, 128]. It supports every
subclass of `codecs.group.Grouped`, including your own.

Each program of the grid loops over the groups in a block of rows and columns.
The statistics of whole rows stay in VMEM until the last columns are done.
Outputs alias inputs, so the step is in place if the caller donates its arrays.
With two moments, a step reads and writes 16.2 bytes per value if parameters and
gradients are f32, and 10.2 bytes if they are bf16.

No TPU has run this kernel yet. The tests interpret it on a CPU, and compile it
for v5e, v5p, v6e and 7x, where it needs no temporary memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from coat_jax.codecs.group import Encoded, Grouped
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart

LANES = 128
# A TPU stores bytes in tiles of 32 x 128.
_TILE_ROWS = 32
# v5e and v5p have 16 MiB of VMEM, which must also hold statistics and what the
# loop computes.
_VMEM_BYTES = 8 * 2**20


def why_not(stored, groups, part, arrays) -> str | None:
  """Returns why the kernel cannot step these moments and arrays, or None."""
  for codec in groups:
    if not isinstance(codec, Grouped):
      return "moments that are not encoded have no groups"
    if codec.group_size != LANES:
      return f"the kernel needs groups of 128, got {codec.group_size}"
  shape = stored[0].codes.shape
  if len(shape) < 2 or shape[-1] % LANES:
    return f"rows must be a multiple of 128 values long, got shape {shape}"
  if len(shape) > 2 and shape[-2] % _TILE_ROWS:
    return f"the last axis but one must be a multiple of 32, got {shape}"
  if len(shape) == 2 and part.layer is not None:
    return f"a layer must have rows, got shape {shape}"
  wrong = {x.dtype.name for x in arrays} - {"float32", "bfloat16"}
  if wrong:
    return f"parameters and gradients must be f32 or bf16, got {wrong}"
  return None


@dataclasses.dataclass(frozen=True)
class Step:
  """An optimizer's step on TPUs.

  Attributes:
    arithmetic: `adam.adam` or `lion.lion`.
    groups: the moments' codecs.
    interpret: whether JAX interprets the kernel, on a CPU.
  """

  arithmetic: Callable[..., tuple[Array, ...]]
  groups: tuple[Grouped, ...]
  interpret: bool

  def __call__(
    self, part: LeafPart, g: Array, p: Array | None, stored, scalars
  ) -> tuple[Array, tuple[Encoded, ...]]:
    """Returns the new parameter, or the update if p is None, and new moments.

    `scalars` are those of the arithmetic; with a parameter a pair of these and
    `StepScalars`.
    """
    packed, treedef = jax.tree.flatten(scalars)
    statistics = [x for moment in stored for x in moment[1:] if x.ndim]
    codes = [moment.codes for moment in stored]
    weight = [] if p is None else [p]
    rows = math.prod(g.shape[:-1])
    height, width = _block([g, *weight, *weight, *codes, *codes])
    values = pl.BlockSpec((height, width), _index_map(0))
    of_layer = _index_map(rows // height)
    in_place = pl.BlockSpec((height, width), of_layer)
    per_group = pl.BlockSpec(
      (height, g.shape[-1] // LANES),
      lambda row, column, place: (of_layer(row, column, place)[0], 0),
    )
    arrays = [_view(x) for x in (*weight, *codes, *statistics)]
    specs = [in_place] * len(weight + codes) + [per_group] * len(statistics)
    update = [] if weight else [_shape_of(_view(g))]
    work = _Work(
      step=self,
      scalars=treedef,
      dims=g.shape[:-1],
      whole=_whole(part, g, codes[0]),
      has_weight=bool(weight),
      present=tuple(tuple(x.ndim > 0 for x in moment[1:]) for moment in stored),
    )
    value, *new = pl.pallas_call(
      functools.partial(_kernel, work=work),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(rows, height), pl.cdiv(g.shape[-1], width)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), values, *specs],
        out_specs=[values] * len(update) + specs,
      ),
      out_shape=[*update, *map(_shape_of, arrays)],
      input_output_aliases={3 + i: len(update) + i for i in range(len(arrays))},
      interpret=self.interpret,
    )(
      _place(part, g.ndim),
      jnp.stack([jnp.float32(x) for x in packed]),
      _view(g),
      *arrays,
    )
    shapes = [x.shape for x in (*codes, *statistics)]
    new = [x.reshape(shape) for x, shape in zip(new, shapes, strict=True)]
    out, rest = [], iter(new[len(codes) :])
    for moment, code in zip(stored, new, strict=False):
      kept = [next(rest) if x.ndim else x for x in moment[1:]]
      out.append(Encoded(code, *kept))
    return value.reshape((g if p is None else p).shape), tuple(out)


@dataclasses.dataclass(frozen=True)
class _Work:
  """The static parameters of a kernel.

  Attributes:
    step: the optimizer's step.
    scalars: structure of the scalars, which are packed into one array.
    dims: the gradient's axes but the last.
    whole: shape of the whole leaf.
    has_weight: whether the parameter is stepped, or the update returned.
    present: for each moment, whether it has an amax and a range.
  """

  step: Step
  scalars: Any
  dims: tuple[int, ...]
  whole: tuple[int, ...]
  has_weight: bool
  present: tuple[tuple[bool, ...], ...]


def _shape_of(x: Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _view(x: Array) -> Array:
  return x.reshape(-1, x.shape[-1])


def _block(arrays: list[Array]) -> tuple[int, int]:
  """Returns the height and width of a block of these arrays in VMEM."""
  rows, n = math.prod(arrays[0].shape[:-1]), arrays[0].shape[-1]
  height = min(rows, _TILE_ROWS)
  # Every block counts twice: Pallas prefetches the next one.
  column_bytes = 2 * _TILE_ROWS * sum(x.dtype.itemsize for x in arrays)
  columns = _VMEM_BYTES // column_bytes
  return height, min(n, columns // LANES * LANES)


def _index_map(blocks_of_layer: int):
  """Returns the function that maps a program of the grid to its block.

  `blocks_of_layer` is the number of block rows per layer if the array stacks
  all layers, and 0 otherwise.
  """

  def index(row, column, place):
    return row + place[1] * blocks_of_layer, column

  return index


def _place(part: LeafPart, ndim: int) -> Array:
  """Packs a part as int32: key, layer, and its start along each axis."""
  layer = jnp.zeros([], jnp.int32) if part.layer is None else part.layer
  start = jnp.zeros(ndim, jnp.uint32) if part.start is None else part.start
  first = jnp.stack([lax.bitcast_convert_type(part.key, jnp.int32), layer])
  return jnp.concatenate([first, start.astype(jnp.int32)])


def _whole(part: LeafPart, g: Array, codes: Array) -> tuple[int, ...]:
  if part.whole is not None:
    return part.whole
  return g.shape if part.layer is None else codes.shape


def _kernel(place_ref, scalars_ref, g_ref, *refs, work: _Work):
  """Steps a block: gradient, parameter, codes and statistics [rows, columns].

  `refs` are the inputs, then the outputs in the same order. Without a
  parameter, the update precedes the other outputs.
  """
  height, width = g_ref.shape
  groups, has_weight = work.step.groups, work.has_weight
  ins, outs = _inputs_and_outputs(refs, has_weight)
  weight_ref, ins = (ins[0], ins[1:]) if has_weight else (None, ins)
  out_ref, outs = outs[0], outs[1:]
  count = len(groups)
  old_statistics = [_widened(ref[...]) for ref in ins[count:]]
  lanes = lax.broadcasted_iota(jnp.int32, old_statistics[0].shape, 1)
  first_group = pl.program_id(1) * (width // LANES)

  @pl.when(pl.program_id(1) == 0)
  def _():
    for old, new in zip(ins[count:], outs[count:], strict=True):
      new[...] = old[...]

  count_scalars = range(work.scalars.num_leaves)
  scalars = work.scalars.unflatten([scalars_ref[i] for i in count_scalars])
  arithmetic_scalars, step = scalars if has_weight else (scalars, None)
  row = _rows(place_ref, height, work)
  key = lax.bitcast_convert_type(place_ref[0], jnp.uint32)
  first_column = pl.program_id(1) * width + place_ref[1 + len(work.whole)]
  needs_words = has_weight or any(codec.needs_noise for codec in groups)

  def one_group(j, statistics):
    at = pl.ds(pl.multiple_of(j * LANES, LANES), LANES)
    # Pick a group's statistic by a mask: lanes cannot be indexed dynamically.
    own = lanes == first_group + j
    picked = [
      jnp.sum(jnp.where(own, x, jnp.zeros_like(x)), axis=1, keepdims=True)
      for x in old_statistics
    ]
    old = [
      codec.decode_groups(Encoded(codes[:, at], *fields))
      for codec, codes, fields in zip(
        groups, ins, _fields(work.present, picked), strict=False
      )
    ]
    g = g_ref[:, at].astype(jnp.float32)
    if step is not None and step.grad_scale is not None:
      g = g * step.grad_scale
    value, *new = work.step.arithmetic(g, *old, arithmetic_scalars)
    words = key
    if needs_words:
      column = lax.broadcasted_iota(jnp.uint32, (height, LANES), 1)
      column = column + (first_column + j * LANES).astype(jnp.uint32)
      words = stochastic.words_at(key, row, column)
    if weight_ref is not None and step is not None:
      p = weight_ref[:, at].astype(jnp.float32)
      value = p + -step.learning_rate * (value + step.weight_decay * p)
    out_ref[:, at] = _rounded(value, out_ref.dtype, words, has_weight)
    updated = []
    for i, (codec, x) in enumerate(zip(groups, new, strict=True)):
      noise = None
      if codec.needs_noise:
        noise = stochastic.uniform(stochastic.next_words(words, i))
      encoded = codec.encode_groups(x, noise)
      outs[i][:, at] = encoded.codes
      updated += [_widened(y) for y in encoded[1:] if y.ndim]
    return [
      jnp.where(own, y, x) for x, y in zip(statistics, updated, strict=True)
    ]

  statistics = [_widened(ref[...]) for ref in outs[count:]]
  new = lax.fori_loop(0, width // LANES, one_group, statistics)
  for ref, x in zip(outs[count:], new, strict=True):
    ref[...] = x.astype(ref.dtype)


def _inputs_and_outputs(refs, has_weight: bool):
  """Splits refs; without a parameter, the update is an additional output."""
  count = (len(refs) - (not has_weight)) // 2
  return refs[:count], refs[count:]


def _widened(x: Array) -> Array:
  """Casts bytes to int32, because a TPU cannot select or add bytes."""
  return x.astype(jnp.int32) if x.dtype == jnp.uint8 else x


def _fields(present, statistics) -> list[list[Array]]:
  """Lists amax and range of each moment; an absent one is a scalar zero."""
  rest = iter(statistics)
  return [
    [next(rest) if there else jnp.int32(0) for there in fields]
    for fields in present
  ]


def _rounded(value, dtype, words, is_weight: bool) -> Array:
  """Rounds a bf16 parameter stochastically; anything else to nearest."""
  if is_weight and dtype == jnp.bfloat16:
    words = stochastic.parameter_words(words)
    return stochastic.round_to_bfloat16(value, words)
  return value.astype(dtype)


def _rows(place_ref, height: int, work: _Work) -> Array:
  """Returns the row of each value in the whole leaf: uint32 [height, 1].

  Rows number all axes but the last in row-major order, modulo 2^32.
  """
  dims, whole = work.dims, work.whole
  local = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
  local = local + pl.program_id(0) * height
  row, stride = jnp.zeros_like(local), 1
  for axis in reversed(range(len(dims))):
    index = local if axis == 0 else lax.rem(local, jnp.int32(dims[axis]))
    local = lax.div(local, jnp.int32(dims[axis]))
    index = index + place_ref[2 + axis]
    if axis == 0 and len(dims) > 1:
      index = index + place_ref[1]
    row = row + index * (stride % 2**32 - 2**32 * (stride % 2**32 >= 2**31))
    stride *= whole[axis]
  return row.astype(jnp.uint32)
