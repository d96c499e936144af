# SPDX-License-Identifier: Apache-2.0
"""An optimizer step on one leaf with encoded moments, in one pass over memory.

This Pallas kernel does on TPUs what `step.step_of` does. Groups must have 128
values, as many as a register has lanes. A tile [rows, 128] then has one whole
group per row, so the kernel can call functions of codecs and optimizers on a
tile. It supports every subclass of `codecs.group.Grouped`, including yours.

Each program of the grid loops over the groups in a block of rows and columns.
The statistics of a row stay in VMEM until the row's last block is done. Outputs
alias inputs, so the step is in place if the caller donates its arrays.

No TPU has run this kernel yet. The tests run it in interpret mode on a CPU, and
compile it for v5e, v5p, v6e and 7x. The compiled programs need hardly any
temporary memory, except on v5p, where XLA may copy statistics.
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
from coat_jax.optimizer import weights
from coat_jax.optimizer.weights import SplitWeight, Weight
from coat_jax.pallas.mosaic_tpu import blocks
from coat_jax.pallas.mosaic_tpu.blocks import LANES


def why_not(stored, groups, part, arrays) -> str | None:
  """Returns why the kernel does not support these arguments, or None."""
  for codec in groups:
    if not isinstance(codec, Grouped):
      return "the TPU kernel needs moments that are encoded in groups"
    if codec.group_size != LANES:
      return f"the kernel needs groups of 128, got {codec.group_size}"
  shape = stored[0].codes.shape
  if len(shape) < 2:
    return f"the kernel needs at least two axes, got shape {shape}"
  if shape[-1] % LANES:
    return f"the last axis must be a multiple of 128, got shape {shape}"
  # If the number of rows is not a multiple of 8, XLA may interleave the layers
  # of a stack in memory, and would then copy the stack for the kernel.
  in_layer = (
    blocks.num_rows(shape) % 8 == 0 and len(blocks.lead_axes(shape)) > 0
  )
  if part.layer is not None and not in_layer:
    return (
      f"each layer of a stack must have a multiple of 8 rows, got shape {shape}"
    )
  wrong = {x.dtype.name for x in arrays} - {"float32", "bfloat16"}
  if wrong:
    return f"parameters and gradients must be f32 or bf16, got {wrong}"
  return None


@dataclasses.dataclass(frozen=True)
class _Work:
  """The static arguments of a kernel."""

  arithmetic: Callable[..., tuple[Array, ...]]
  groups: tuple[Grouped, ...]
  scalars: Any  # Tree structure of the scalars, which are packed in one array.
  dims: tuple[int, ...]  # Sizes of the gradient's axes, except the last.
  axes: tuple[int, ...]  # For each axis in `dims`, its index in the leaf.
  whole: tuple[int, ...]  # Shape of the whole leaf.
  num_weights: int  # Number of the parameter's arrays; 0 without a parameter.
  # For each moment: whether its codec stores an amax and a range.
  present: tuple[tuple[bool, ...], ...]


def run(
  arithmetic: Callable[..., tuple[Array, ...]],
  part: LeafPart,
  g: Array,
  p: Weight | None,
  stored,
  scalars,
  groups: tuple[Grouped, ...],
  interpret: bool,
) -> tuple[Any, tuple[Encoded, ...]]:
  """Returns (new parameter, new moments), or (update, new moments) without p.

  `arithmetic` is `adam.adam` or `lion.lion`. `groups` are the moments' codecs.
  Without p, `scalars` is the last argument of `arithmetic`. With p, `scalars`
  is a pair of that argument and a `StepScalars`.
  """
  whole, axes = _whole(part, g, stored[0].codes), tuple(range(g.ndim - 1))
  is_swapped = part.layer is None and blocks.is_stored_by_rows(g.shape)
  if is_swapped:
    axes, (g, p, stored) = (1, 0), _swapped((g, p, stored))
  work = _Work(
    arithmetic=arithmetic,
    groups=groups,
    scalars=jax.tree.structure(scalars),
    dims=g.shape[:-1],
    axes=axes,
    whole=whole,
    num_weights=len(jax.tree.leaves(p)),
    present=tuple(tuple(x.ndim > 0 for x in moment[1:]) for moment in stored),
  )
  out = _run(work, _place(part, g.ndim), g, p, stored, scalars, interpret)
  return _swapped(out) if is_swapped else out


def _swapped(tree):
  """Swaps the first two axes of arrays."""
  return jax.tree.map(lambda x: x.swapaxes(0, 1) if x.ndim else x, tree)


def _run(work: _Work, place: Array, g, p, stored, scalars, interpret: bool):
  """Runs the kernel."""
  statistics = [x for moment in stored for x in moment[1:] if x.ndim]
  codes = [moment.codes for moment in stored]
  weight = jax.tree.leaves(p)
  block = blocks.Blocks.of([g, *weight, *weight, *codes, *codes])
  num_matrices = math.prod(blocks.lead_axes(g.shape))
  arrays = [*weight, *codes, *statistics]
  specs = [block.spec(x, num_matrices) for x in (*weight, *codes)]
  specs += [block.whole_rows(x, num_matrices) for x in statistics]
  update = [] if weight else [g]
  new = pl.pallas_call(
    functools.partial(_kernel, work=work),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(
        num_matrices,
        pl.cdiv(blocks.num_rows(g.shape), block.height),
        pl.cdiv(g.shape[-1], block.width),
      ),
      in_specs=[
        pl.BlockSpec(memory_space=pltpu.SMEM),
        block.spec(g),
        *specs,
      ],
      out_specs=[block.spec(x) for x in update] + specs,
    ),
    out_shape=[_shape_of(blocks.view(x)) for x in (*update, *arrays)],
    input_output_aliases={3 + i: len(update) + i for i in range(len(arrays))},
    interpret=interpret,
  )(
    place,
    jnp.stack([jnp.float32(x) for x in jax.tree.leaves(scalars)]),
    blocks.view(g),
    *map(blocks.view, arrays),
  )
  written, treedef = jax.tree.flatten(
    (g if p is None else p, codes, statistics)
  )
  value, codes, statistics = treedef.unflatten(map(blocks.unview, new, written))
  left = iter(statistics)
  moments = tuple(
    Encoded(code, *(next(left) if x.ndim else x for x in moment[1:]))
    for moment, code in zip(stored, codes, strict=True)
  )
  return value, moments


def _shape_of(x: Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _place(part: LeafPart, ndim: int) -> Array:
  """Packs key, layer and start index on each axis into one int32 array."""
  layer = jnp.zeros([], jnp.int32) if part.layer is None else part.layer
  start = jnp.zeros(ndim, jnp.uint32) if part.start is None else part.start
  first = jnp.stack([lax.bitcast_convert_type(part.key, jnp.int32), layer])
  return jnp.concatenate([first, start.astype(jnp.int32)])


def _whole(part: LeafPart, g: Array, codes: Array) -> tuple[int, ...]:
  if part.whole is not None:
    return part.whole
  return g.shape if part.layer is None else codes.shape


def _kernel(place_ref, scalars_ref, g_ref, *refs, work: _Work):
  """Computes the step of one block.

  `refs` are the inputs (the parameter's arrays, codes and statistics), followed
  by the outputs in the same order. Without a parameter, the first output is the
  update, which has no corresponding input.
  """
  ins, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]

  @pl.when(pl.program_id(2) == 0)
  def _():
    first = work.num_weights + len(work.groups)
    for old, new in zip(ins[first:], outs[-len(ins[first:]) :], strict=True):
      new[...] = old[...]

  for plane in range(2) if g_ref.ndim > 2 else (None,):
    _step_plane(place_ref, scalars_ref, g_ref, ins, outs, plane, work)


def _step_plane(place_ref, scalars_ref, g_ref, ins, outs, plane, work: _Work):
  """Computes the step of a block [height, width], or of one of its planes."""
  height, width = g_ref.shape[0], g_ref.shape[-1]
  groups, has_weight = work.groups, work.num_weights > 0
  weight_refs, ins = ins[: work.num_weights], ins[work.num_weights :]
  out_refs, outs = outs[: -len(ins)], outs[-len(ins) :]
  count = len(groups)

  def read(ref, columns: Any = slice(None)):
    return ref[blocks.index_of(ref, plane, columns)]

  old_statistics = [_widened(read(ref)) for ref in ins[count:]]
  lanes = lax.broadcasted_iota(jnp.int32, old_statistics[0].shape, 1)
  first_group = pl.program_id(2) * (width // LANES)
  count_scalars = range(work.scalars.num_leaves)
  scalars = work.scalars.unflatten([scalars_ref[i] for i in count_scalars])
  arithmetic_scalars, step = scalars if has_weight else (scalars, None)
  row = _rows(place_ref, height, plane, work)
  key = lax.bitcast_convert_type(place_ref[0], jnp.uint32)
  first_column = pl.program_id(2) * width + place_ref[1 + len(work.whole)]
  needs_words = has_weight or any(codec.needs_noise for codec in groups)

  def one_group(j, statistics):
    at = pl.ds(pl.multiple_of(j * LANES, LANES), LANES)
    # Select the group's statistics with a mask, because a TPU cannot index
    # lanes dynamically.
    own = lanes == first_group + j
    picked = [
      jnp.sum(jnp.where(own, x, jnp.zeros_like(x)), axis=1, keepdims=True)
      for x in old_statistics
    ]
    old = [
      codec.decode_groups(Encoded(read(codes, at), *fields))
      for codec, codes, fields in zip(
        groups, ins, _fields(work.present, picked), strict=False
      )
    ]
    g = read(g_ref, at).astype(jnp.float32)
    if step is not None and step.grad_scale is not None:
      g = g * step.grad_scale
    value, *new = work.arithmetic(g, *old, arithmetic_scalars)
    words = key
    if needs_words:
      column = lax.broadcasted_iota(jnp.uint32, (height, LANES), 1)
      column = column + (first_column + j * LANES).astype(jnp.uint32)
      words = stochastic.words_at(key, row, column)
    if step is not None:
      parts = [read(ref, at) for ref in weight_refs]
      p = weights.in_f32(SplitWeight(*parts) if len(parts) > 1 else parts[0])
      value = p + -step.learning_rate * (value + step.weight_decay * p)
    rounded = _rounded(value, out_refs, words, has_weight)
    for ref, x in zip(out_refs, rounded, strict=True):
      ref[blocks.index_of(ref, plane, at)] = x
    updated = []
    for i, (codec, x) in enumerate(zip(groups, new, strict=True)):
      noise = None
      if codec.needs_noise:
        noise = stochastic.uniform(stochastic.next_words(words, i))
      encoded = codec.encode_groups(x, noise)
      outs[i][blocks.index_of(outs[i], plane, at)] = encoded.codes
      updated += [_widened(y) for y in encoded[1:] if y.ndim]
    return [
      jnp.where(own, y, x) for x, y in zip(statistics, updated, strict=True)
    ]

  statistics = [_widened(read(ref)) for ref in outs[count:]]
  new = lax.fori_loop(0, width // LANES, one_group, statistics)
  for ref, x in zip(outs[count:], new, strict=True):
    ref[blocks.index_of(ref, plane)] = x.astype(ref.dtype)


def _widened(x: Array) -> Array:
  """Casts bytes to int32, because a TPU cannot select or add bytes."""
  return x.astype(jnp.int32) if x.dtype == jnp.uint8 else x


def _fields(present, statistics) -> list[list[Array]]:
  """Returns each moment's amax and range; a field that is not stored is 0."""
  rest = iter(statistics)
  return [
    [next(rest) if there else jnp.int32(0) for there in fields]
    for fields in present
  ]


def _rounded(value, refs, words, is_weight: bool) -> tuple[Array, ...]:
  """Rounds to the dtypes of `refs`; bf16 and 24-bit weights stochastically."""
  dtype = refs[0].dtype
  if is_weight and dtype == jnp.bfloat16:
    words = stochastic.parameter_words(words)
    if len(refs) > 1:
      return weights.split(value, words)
    return (stochastic.round_to_bfloat16(value, words),)
  return (value.astype(dtype),)


def _rows(place_ref, height: int, plane: int | None, work: _Work) -> Array:
  """Returns each row's number in the whole leaf, modulo 2^32.

  The numbers are uint32 [height, 1], in row-major order over all axes except
  the last.
  """
  matrix = pl.program_id(0)
  local = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
  indices = [local + pl.program_id(1) * height]
  if plane is not None:
    indices.append(jnp.int32(plane))
  for size in reversed(work.dims[: len(work.dims) - len(indices)]):
    indices.insert(0, lax.rem(matrix, jnp.int32(size)))
    matrix = lax.div(matrix, jnp.int32(size))
  indices[0] = indices[0] + place_ref[1]
  row = jnp.zeros_like(local)
  for index, axis in zip(indices, work.axes, strict=True):
    stride = math.prod(work.whole[axis + 1 : -1]) % 2**32
    stride -= 2**32 * (stride >= 2**31)
    row = row + (index + place_ref[2 + axis]) * stride
  return row.astype(jnp.uint32)
