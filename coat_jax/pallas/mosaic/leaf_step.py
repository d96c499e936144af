# SPDX-License-Identifier: Apache-2.0
"""An optimizer step on one leaf with encoded moments, in one pass over memory.

One kernel does what `step.step_of` does, for any optimizer: it decodes the
moments, applies the optimizer's `Rule`, and encodes the moments again. The
kernel overwrites moments and parameters, so the step is in place if the caller
donates these arrays. A warpgroup processes tiles of 8 groups of 128 values.
Either each tile has a program of its own, or warpgroups take turns (`turns`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.codecs.fp8 import ExpandedFP8
from coat_jax.codecs.group import Encoded, GroupCodec, Plain
from coat_jax.codecs.integers import LogUniform
from coat_jax.numerics.stochastic import LeafPart, next_words, parameter_words
from coat_jax.ops.capability import HOPPER, why_not_before
from coat_jax.pallas.mosaic import (
  device,
  factors,
  moment_codecs,
  registers,
  turns,
  weights,
  words,
)
from coat_jax.pallas.mosaic.factors import Factors, Sizes
from coat_jax.pallas.mosaic.moment_codecs import Decoded
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE, ROWS
from coat_jax.pallas.mosaic.registers import Instructions

GroupCodecs = tuple[GroupCodec, ...]

# If warpgroups take turns, this many run on a multiprocessor. They get 72
# registers per thread and do not spill; with 8, they would.
_WARPGROUPS = 7


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
  takes_turns: bool
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
    takes_turns=_takes_turns(groups, g.dtype),
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


def _takes_turns(groups: GroupCodecs, dtype: DTypeLike) -> bool:
  """Returns whether warpgroups take turns; `dtype` is the gradient's.

  They do where it is faster on an H200. If both moments are rounded
  stochastically, a tile's own program gets so many registers that only 16 to 24
  warps run on a multiprocessor. But with f32 gradients and weights, `log8` is
  limited by memory bandwidth, which that many warps reach.
  """
  if device.why_not_hopper() is not None or len(groups) < 2:
    return False
  faster: Any = ExpandedFP8
  if dtype == jnp.bfloat16:
    faster = ExpandedFP8, LogUniform
  return all(isinstance(x, faster) and x.needs_noise for x in groups)


# With this jit, leaves of the same shape are lowered and compiled only once.
@functools.partial(jax.jit, static_argnames="work")
def _step(scalars, place, g, p, stored, read, *, work: _Work):
  codes = stored[0].codes

  def view(x):
    has_values = x.shape[-1] == codes.shape[-1]
    return x.reshape((-1, GROUP_SIZE) if has_values else (-1,))

  in_place, treedef = jax.tree.flatten((p, stored))
  refs = [jax.new_ref(view(x)) for x in in_place]
  count = g.size // (GROUP_SIZE * ROWS)
  options: dict[str, Any] = {}
  if work.takes_turns:
    count = turns.programs(count, work.interpret)
    dtypes = [g.dtype, *(ref.dtype for ref in refs if ref.ndim == 2)]
    options = dict(
      num_threads=_WARPGROUPS,
      thread_name="warpgroup",
      scratch_types=dict(ahead=turns.Ahead.types(dtypes, _WARPGROUPS)),
    )
  update = plgpu.kernel(
    functools.partial(_kernel, work=work, shape=codes.shape, treedef=treedef),
    out_type=jax.ShapeDtypeStruct(view(g).shape, g.dtype) if p is None else (),
    grid=(count,),
    grid_names=("program",),
    **options,
    compiler_params=plgpu.CompilerParams(
      # Exact division, exp2 and log2 would take ten times as long.
      approx_math=True,
      # In global memory, threads share only statistics, each among the 16 lanes
      # of a group. A lane overwrites a statistic only after it has received
      # what the other 15 lanes computed from the old value. For shared memory,
      # `turns` has a barrier.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams(detect_races=work.takes_turns)
    if work.interpret
    else False,
  )(scalars, place, view(g), *read, *refs)
  new = [
    jax.freeze(ref).reshape(x.shape)
    for ref, x in zip(refs, in_place, strict=True)
  ]
  p, stored = treedef.unflatten(new)
  return update.reshape(g.shape) if p is None else p, stored


class _Refs(NamedTuple):
  """A kernel's arrays in global memory.

  Values and codes are [groups, 128], and statistics are [groups].
  """

  scalars: Any  # Fields of the rule.
  place: Any  # The `LeafPart`'s key, start and layer (if not None), uint32.
  g: Any  # Gradient of the leaf, or of the part's layer.
  factors: Sequence[Any]  # See `factors.load`; may be empty.
  p: Any  # Parameter, a pytree; may be None.
  moments: Any  # Encoded moments, a pytree.
  update: Sequence[Any]  # The update if p is None, otherwise empty.

  @classmethod
  def of(cls, scalars, place, g, *others, treedef, has_factors) -> "_Refs":
    factors, others = others[: 2 * has_factors], others[2 * has_factors :]
    count = treedef.num_leaves
    p, moments = treedef.unflatten(others[:count])
    return cls(scalars, place, g, factors, p, moments, others[count:])


def _kernel(
  *gmem,
  work: _Work,
  shape: tuple[int, ...],
  treedef: Any,
  ahead: turns.Ahead | None = None,
):
  """Computes the step of this program's tile, or of this warpgroup's tiles.

  Args:
    *gmem: the arrays of `_Refs`; `treedef` is the tree of (p, moments).
    shape: shape of the codes, with all layers.
    ahead: shared memory if warpgroups take turns, otherwise None.
  """
  refs = _Refs.of(*gmem, treedef=treedef, has_factors=work.factors is not None)
  before = 0  # Number of groups in the layers before the part's layer.
  if work.has_layer:
    layer = refs.place[refs.place.shape[0] - 1].astype(jnp.int32)
    before = layer * refs.g.shape[0]

  def parts(tile):
    own = functools.partial(registers.part, start=before + tile * ROWS)
    g = registers.part(refs.g, tile * ROWS)
    return g, *map(own, jax.tree.leaves((refs.p, refs.moments)))

  def compute(tile, load):
    g, *old = load(parts(tile))
    values = g, *treedef.unflatten(old)
    _compute(tile * ROWS, before, values, refs, work, shape)

  if ahead is None:
    load = functools.partial(map, registers.load)
    compute(lax.axis_index("program"), load)
  else:
    count = refs.g.shape[0] // ROWS
    ahead.take_turns(compute, parts, count, work.interpret)


def _compute(start, before, values, refs: _Refs, work: _Work, shape) -> None:
  """Computes the step of the tile that begins at group `start` of g.

  In arrays that are overwritten, it begins `before` groups later. `values` are
  the tile's g, p and moments.
  """
  g, p, stored = values
  factored = ()
  if work.factors is not None:
    rows_gmem, columns_gmem = refs.factors
    factored = (factors.load(rows_gmem, columns_gmem, work.factors, start),)
  start = start + before
  groups, on = work.groups, Instructions(work.interpret)
  named = {name: refs.scalars[i] for i, name in enumerate(work.names)}
  weight = jax.tree.leaves(p)
  p = weights.in_f32(on, *weight) if weight else None
  codecs = [moment_codecs.on_registers(codec) for codec in groups]
  old = tuple(
    codec.decode(moment, i == 0, on)
    for i, (codec, moment) in enumerate(zip(codecs, stored, strict=True))
  )
  rule = work.rule(**named)
  value, new = rule.apply(g, p, (*old, *factored), on)

  @functools.cache
  def draw():
    # Call this only if words are needed: Mosaic cannot infer a layout for
    # unused values.
    place = words.row_and_column(start, shape, work.whole, refs.place)
    return words.random_words(*place, refs.place[0])

  def store(refs, values):
    for ref, x in zip(jax.tree.leaves(refs), values, strict=True):
      registers.store(ref, start, x)

  if weight:
    leaves = jax.tree.leaves(refs.p)
    noise = lambda: parameter_words(draw())  # noqa: E731
    store(leaves, weights.round_like(leaves, value, noise, on))
  else:
    store(refs.update, [value.astype(g.dtype)])
  noises: list[Array | None] = [None] * len(groups)
  if any(codec.needs_noise for codec in groups):
    both = draw(), next_words(draw())
    noises = [
      words.mantissas(word) if codec.needs_noise else None
      for codec, word in zip(groups, both, strict=False)
    ]
  new = new[: len(codecs)]
  encoded = moment_codecs.encode_moments(codecs, new, noises, on)
  store(refs.moments, jax.tree.leaves(encoded))
