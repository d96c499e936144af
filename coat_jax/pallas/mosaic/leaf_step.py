# SPDX-License-Identifier: Apache-2.0
"""An optimizer step on one leaf with encoded moments, in one pass over memory.

One kernel does what `step.step_of` does, for any optimizer: it decodes the
moments, applies the optimizer's `Rule`, and encodes the moments again. The
kernel overwrites moments and parameters, so the step is in place if the caller
donates these arrays. A warpgroup processes tiles of 8 groups of 128 values.
"""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.codecs.group import Encoded, GroupCodec, Plain
from coat_jax.numerics.stochastic import LeafPart, next_words, parameter_words
from coat_jax.ops.capability import HOPPER, why_not_before
from coat_jax.pallas.mosaic import (
  device,
  factors,
  moment_codecs,
  registers,
  tiles,
  weights,
  words,
)
from coat_jax.pallas.mosaic.factors import Factors, Sizes
from coat_jax.pallas.mosaic.moment_codecs import Decoded
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE, ROWS
from coat_jax.pallas.mosaic.registers import Instructions

GroupCodecs = tuple[GroupCodec, ...]

# Number of warpgroups in a program (thread block). If it is 1, there is one
# program per tile. Otherwise, there is at most one program per multiprocessor,
# and each warpgroup processes one tile after another. The compiler then divides
# the registers of a multiprocessor among the warpgroups. With 6, `coat` gets 80
# registers per thread instead of 117 (f32) or 127 (BF16) and still does not
# spill, so 24 warps instead of 16 hide the latency of memory. Not yet timed.
_WARPGROUPS = 1


@runtime_checkable
class Rule(Protocol):
  """An optimizer's arithmetic: a frozen dataclass whose fields are scalars.

  `run` gets a rule whose fields are f32 scalars, or None. The kernel loads the
  scalars, and constructs the rule again by keyword, without the fields that are
  None. So the default of such fields must be None.
  """

  def apply(
    self, g: Array, p: Array | None, old: tuple[Decoded, ...], on: Instructions
  ) -> tuple[Array, tuple[Array, ...]]:
    """Returns a tile's new parameter (its update if p is None) and new moments.

    g is f32 or bf16, and p is f32. `old` has one or two moments, of which the
    second is never negative.
    """
    ...


def why_not(stored, groups, arrays) -> str | None:
  """Returns why the kernel does not support these arguments, or None."""
  # GPUs before compute capability 8.9 have no conversions to E4M3, and GPUs
  # before Hopper have no `min.u16x2`, which `ptx.e4m3_codes` uses.
  reason = why_not_before(HOPPER, "a Mosaic GPU kernel")
  if reason is not None:
    return reason
  if any(isinstance(codec, Plain) for codec in groups):
    return "the GPU kernel needs moments that are encoded in groups"
  for codec in groups:
    if not moment_codecs.is_registered(codec):
      return f"the GPU kernel does not support the codec {type(codec).__name__}"
  sizes = {codec.group_size for codec in groups}
  if sizes != {GROUP_SIZE}:
    got = ", ".join(map(str, sorted(sizes)))
    return f"the GPU kernel needs groups of 128, got {got}"
  shape, count = stored[0].codes.shape, arrays[-1].size // GROUP_SIZE
  if not shape or shape[-1] % GROUP_SIZE:
    return f"the last axis must be a multiple of 128, got shape {shape}"
  if not count or count % ROWS:
    return (
      f"the number of groups must be a multiple of {ROWS}, got {count} in "
      f"shape {arrays[-1].shape}"
    )
  wrong = {x.dtype.name for x in arrays} - {"float32", "bfloat16"}
  if wrong:
    return f"parameters and gradients must be f32 or bf16, got {wrong}"
  return None


@dataclasses.dataclass(frozen=True)
class _Work:
  """The static arguments of a kernel."""

  rule: type[Rule]
  names: tuple[str, ...]  # Names of the rule's scalars that are not None.
  whole: tuple[int, ...] | None  # See `LeafPart`.
  has_layer: bool  # Whether the kernel updates only one layer of the leaf.
  groups: GroupCodecs
  factors: Sizes | None
  warpgroups: int  # See `_WARPGROUPS`.
  interpret: bool


def run(
  rule: Rule,
  part: LeafPart,
  g,
  p,
  stored,
  groups: GroupCodecs,
  interpret: bool,
  factored: Encoded | None = None,
):
  """Returns the new parameter and moments.

  If p is None, the first result is the update, in the gradient's dtype. If the
  moment `factored` is passed, the rule gets it after the stored moments, and
  the rule's new value for it is ignored.
  """
  names = tuple(k for k, v in vars(rule).items() if v is not None)
  scalars = jnp.stack([getattr(rule, name) for name in names])
  place = [part.key[None]]
  if part.start is not None:
    place.append(part.start)
  if part.layer is not None:
    place.append(part.layer.astype(jnp.uint32)[None])
  read, sizes = (), None
  if factored is not None:
    sizes = Sizes.of(factored)
    read = Factors.of(factored, sizes)
  work = _Work(
    rule=type(rule),
    names=names,
    whole=part.whole,
    has_layer=part.layer is not None,
    groups=groups,
    factors=sizes,
    warpgroups=_WARPGROUPS,
    interpret=interpret,
  )
  # Fields that a codec does not use are stored as scalar zeros. The kernel gets
  # None instead.
  used = jax.tree.map(lambda x: x if x.ndim else None, stored)
  first, new = _step(
    scalars, jnp.concatenate(place), g, p, used, tuple(read), work=work
  )
  new = jax.tree.map(lambda x, y: x if y is None else y, stored, new)
  return first, new


# With this jit, leaves of the same shape are lowered and compiled only once.
@functools.partial(jax.jit, static_argnames="work")
def _step(scalars, place, g, p, stored, read, *, work: _Work):
  codes = stored[0].codes

  def view(x):
    has_values = x.shape[-1] == codes.shape[-1]
    return x.reshape((-1, GROUP_SIZE) if has_values else (-1,))

  in_place, treedef = jax.tree.flatten((stored, p))
  refs = [jax.new_ref(view(x)) for x in in_place]
  kernel = functools.partial(
    _kernel, work=work, shape=codes.shape, treedef=treedef
  )
  update = plgpu.kernel(
    functools.partial(_own_tiles, kernel, work=work),
    out_type=jax.ShapeDtypeStruct(view(g).shape, g.dtype) if p is None else (),
    grid=(_programs(g.size // (GROUP_SIZE * ROWS), work),),
    grid_names=("program",),
    **_threads(work),
    compiler_params=plgpu.CompilerParams(
      # Exact division, exp2 and log2 would take ten times as long.
      approx_math=True,
      # No barriers are needed: threads share only statistics, each among the 16
      # lanes of a group. A lane overwrites a statistic only after it has
      # received what the other 15 lanes computed from the old value.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams() if work.interpret else False,
  )(scalars, place, view(g), *read, *refs)
  new = [
    jax.freeze(ref).reshape(x.shape)
    for ref, x in zip(refs, in_place, strict=True)
  ]
  stored, p = treedef.unflatten(new)
  return update.reshape(g.shape) if p is None else p, stored


def _programs(count: int, work: _Work) -> int:
  """Returns the number of programs that compute `count` tiles."""
  if work.warpgroups == 1:
    return count
  return min(count, 2 if work.interpret else device.multiprocessors())


def _threads(work: _Work) -> dict[str, Any]:
  # With these options, Mosaic adds a barrier.
  if work.warpgroups == 1:
    return {}
  return dict(num_threads=work.warpgroups, thread_name="warpgroup")


def _own_tiles(kernel, scalars_gmem, place_gmem, g_gmem, *gmem, work: _Work):
  """Computes this warpgroup's tiles; see `_WARPGROUPS`."""
  refs = scalars_gmem, place_gmem, g_gmem, *gmem
  count = g_gmem.shape[0] // ROWS
  if work.warpgroups == 1:
    kernel(lax.axis_index("program"), *refs)
    return
  tiles.take_turns(
    lambda tile, _: kernel(tile, *refs),
    count,
    _programs(count, work),
    work.warpgroups,
  )


def _kernel(
  tile,
  scalars_gmem,
  place_gmem,
  g_gmem,
  *gmem,
  work: _Work,
  shape: tuple[int, ...],
  treedef: Any,
):
  """Computes the step of one tile.

  Args:
    tile: index of the tile.
    place_gmem: the `LeafPart`'s key, start and layer (if not None), uint32.
    g_gmem: gradient [groups, 128] of the leaf, or of the part's layer.
    *gmem: factors (if any), the leaves of the tree (moments, parameter), and
      the update (if the parameter is None). Codes are [groups, 128], statistics
      [groups].
    shape: shape of the codes, with all layers.
  """
  start = tile * ROWS
  g = registers.load(g_gmem, start)
  factored = ()
  if work.factors is not None:
    rows_gmem, columns_gmem, *gmem = gmem
    factored = (factors.load(rows_gmem, columns_gmem, work.factors, start),)
  if work.has_layer:
    layer = place_gmem[place_gmem.shape[0] - 1].astype(jnp.int32)
    start = start + layer * g_gmem.shape[0]
  groups, on = work.groups, Instructions(work.interpret)
  named = {name: scalars_gmem[i] for i, name in enumerate(work.names)}
  rule = work.rule(**named)
  moments_gmem, p_gmem = treedef.unflatten(gmem[: treedef.num_leaves])
  weight_gmem = jax.tree.leaves(p_gmem)
  weight = [registers.load(ref, start) for ref in weight_gmem]
  stored = jax.tree.map(lambda ref: registers.load(ref, start), moments_gmem)
  p = weights.in_f32(on, *weight) if weight else None
  codecs = [moment_codecs.on_registers(codec) for codec in groups]
  old = tuple(
    codec.decode(moment, i == 0, on)
    for i, (codec, moment) in enumerate(zip(codecs, stored, strict=True))
  )
  value, new = rule.apply(g, p, (*old, *factored), on)

  @functools.cache
  def draw():
    # Call this only if words are needed: Mosaic cannot infer a layout for
    # unused values.
    place = words.row_and_column(start, shape, work.whole, place_gmem)
    return words.random_words(*place, place_gmem[0])

  if weight:
    values = weights.round_like(
      weight_gmem, value, lambda: parameter_words(draw()), on
    )
    for ref, out in zip(weight_gmem, values, strict=True):
      registers.store(ref, start, out)
  else:
    [update_gmem] = gmem[treedef.num_leaves :]
    registers.store(update_gmem, start, value.astype(update_gmem.dtype))
  noises: list[Array | None] = [None] * len(groups)
  if any(codec.needs_noise for codec in groups):
    both = draw(), next_words(draw())
    noises = [
      words.mantissas(word) if codec.needs_noise else None
      for codec, word in zip(groups, both, strict=False)
    ]
  new = new[: len(codecs)]
  encoded = moment_codecs.encode_moments(codecs, new, noises, on)
  leaves = jax.tree.leaves(encoded)
  for ref, out in zip(jax.tree.leaves(moments_gmem), leaves, strict=True):
    registers.store(ref, start, out)
