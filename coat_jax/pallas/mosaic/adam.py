# SPDX-License-Identifier: Apache-2.0
"""A step of Adam on one leaf with encoded moments, in one pass over memory.

`adam.adam_update` and `adam.adamw_step` as one kernel (Mosaic GPU): decode both
moments, update them, the update or the new parameter, encode. Results are
written to where they were read from: in place where the caller donates them.

A program of one warpgroup holds a tile of 8 groups of 128 values. Everything
that belongs to a group is computed once for 8 values of it. With f32
parameters and gradients and E4M3 codes a step reads and writes 16.2 bytes a
value (p twice, g, two codes twice), with bf16 10.2, with weights of 24 bits and
bf16 gradients 12.2.

One H200, 2026-11-21, jax 0.11.2, 2^28 parameters, donated, one run (ms):

  codec, rounding         f32    bf16    instructions a value (f32, bf16)
  coat nearest            1.11   0.99     58    77
  coat stochastic         1.56   1.67    108   126
  log8 stochastic         1.29   1.38    104   121
  optax.adamw (XLA)       1.81   0.92

Since then a gradient is bounded: log8 takes 3 to 5 % longer for it on an H100.

To nearest with f32, memory bounds it. With stochastic rounding instructions do:
the hash alone takes 11, once more for bf16 parameters, and registers (128; log8
96) leave 16 warps (20) to a multiprocessor. docs/LOG.md says what did not help.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.codecs.group import GroupCodec, Plain
from coat_jax.formats import ROOT_OF_LARGEST
from coat_jax.ops.dispatch import supported
from coat_jax.ops.types import Unsupported
from coat_jax.pallas.mosaic import moment_codecs, registers, weights
from coat_jax.pallas.mosaic.moment_codecs import Statistics
from coat_jax.pallas.mosaic.registers import GROUP_SIZE, ROWS, Instructions
from coat_jax.stochastic import GOLDEN, mix


def adam_update(
  g,
  stored,
  key,
  scalars,
  *,
  groups,
  start=None,
  whole=None,
  interpret: bool = False,
):
  """`adam.adam_update`. With `interpret`, on a CPU, slowly."""
  _check("adam_update", stored, groups, scalars, (g,))
  supported()
  numbers = _adam_numbers(scalars)
  place = _Place(jnp.stack([key, key]), start, whole, None)
  return _run(numbers, place, g, None, stored, groups, interpret)


def adamw_step(
  p,
  g,
  stored,
  keys,
  scalars,
  step,
  *,
  groups,
  start=None,
  whole=None,
  layer=None,
  interpret: bool = False,
):
  """`adam.adamw_step`. With `interpret`, on a CPU, slowly."""
  values = jax.tree.leaves(p)[0]  # A `SplitWeight` has low bytes too.
  _check("adamw_step", stored, groups, scalars, (values, g))
  supported()
  numbers = dataclasses.replace(
    _adam_numbers(scalars),
    grad_scale=step.grad_scale,
    update_rate=-step.learning_rate * scalars.ratio,
    decay_rate=-step.learning_rate * step.weight_decay,
  )
  place = _Place(keys, start, whole, layer)
  return _run(numbers, place, g, p, stored, groups, interpret)


def _check(op: str, stored, groups, scalars, arrays) -> None:
  """Raises `Unsupported` where the kernel cannot take these."""
  if scalars.gradient_ratio is not None:
    raise Unsupported(f"{op}: the kernel has no Nesterov momentum")
  if any(isinstance(codec, Plain) for codec in groups):
    raise Unsupported(f"{op}: moments that are not encoded have no groups")
  for codec in groups:
    if not moment_codecs.is_registered(codec):
      name = type(codec).__name__
      raise Unsupported(f"{op}: the kernel knows no codec {name}")
  sizes = {codec.group_size for codec in groups}
  if sizes != {GROUP_SIZE}:
    got = ", ".join(map(str, sorted(sizes)))
    raise Unsupported(f"{op}: the kernel needs groups of 128, got {got}")
  codes = stored[0].codes
  shape, count = codes.shape, arrays[-1].size // GROUP_SIZE
  if not shape or shape[-1] % GROUP_SIZE:
    raise Unsupported(
      f"{op}: the last axis must be a multiple of 128, got shape {shape}"
    )
  if not count or count % ROWS:
    raise Unsupported(
      f"{op}: the kernel takes 8 groups at a time, got {count} in {shape}"
    )
  wrong = {x.dtype.name for x in arrays} - {"float32", "bfloat16"}
  if wrong:
    raise Unsupported(
      f"{op}: parameters and gradients must be f32 or bf16, got {wrong}"
    )


class _Place(NamedTuple):
  """What is stepped, and what its random words depend on.

  Attributes:
    keys: uint32 [2], of the moments and of the parameter.
    start, whole: which part of the leaf this is; None for all of it: see
      `stochastic.random_words`.
    layer: which layer of it is stepped; None for all of it.
  """

  keys: Array
  start: Array | None
  whole: tuple[int, ...] | None
  layer: Array | None

  def packed(self) -> Array:
    """What is not None, but `whole`: uint32."""
    parts = [self.keys]
    if self.start is not None:
      parts.append(self.start)
    if self.layer is not None:
      parts.append(self.layer.astype(jnp.uint32)[None])
    return jnp.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class _Numbers:
  """The scalars of a step: arrays on the host, loaded values in a kernel."""

  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array
  ratio: Array
  eps_root: Array | None
  eps: Array
  grad_scale: Array | None = None
  update_rate: Array | None = None
  decay_rate: Array | None = None

  def names(self) -> tuple[str, ...]:
    """The names of those that are not None."""
    return tuple(k for k, v in vars(self).items() if v is not None)


def _adam_numbers(scalars) -> _Numbers:
  kept = {field.name for field in dataclasses.fields(_Numbers)}
  return _Numbers(**{k: v for k, v in scalars._asdict().items() if k in kept})


def _run(numbers, place: _Place, g, p, stored, groups, interpret):
  """Runs either function: p is None where the update is wanted."""
  packed = jnp.stack([getattr(numbers, name) for name in numbers.names()])
  flat, treedef = jax.tree.flatten(stored)
  kept = [i for i, x in enumerate(flat) if x.ndim]
  first, arrays = _step(
    packed,
    place.packed(),
    g,
    p,
    tuple(flat[i] for i in kept),
    names=numbers.names(),
    whole=place.whole,
    has_layer=place.layer is not None,
    groups=groups,
    interpret=interpret,
  )
  for i, x in zip(kept, arrays, strict=True):
    flat[i] = x
  return first, treedef.unflatten(flat)


# Jitted here, so that leaves of one shape share a lowering and a compilation.
@functools.partial(
  jax.jit,
  static_argnames=("names", "whole", "has_layer", "groups", "interpret"),
)
def _step(
  packed, place, g, p, stored, *, names, whole, has_layer, groups, interpret
):
  codes = stored[0]

  def view(x):
    has_values = x.shape[-1] == codes.shape[-1]
    return x.reshape((-1, GROUP_SIZE) if has_values else (-1,))

  weight, of_weight = jax.tree.flatten(p)  # None has no arrays.
  in_place = (*stored, *weight)
  refs = [jax.new_ref(view(x)) for x in in_place]
  body = functools.partial(
    _kernel,
    names=names,
    groups=groups,
    shape=codes.shape,
    whole=whole,
    groups_per_layer=g.size // GROUP_SIZE if has_layer else None,
    present=tuple(_present(codec) for codec in groups),
    on=Instructions(interpret),
    num_weights=len(weight),
  )
  update = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(view(g).shape, g.dtype) if p is None else (),
    grid=(g.size // (GROUP_SIZE * ROWS),),
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(
      # Exact division, exp2 and log2 take ten times as long.
      approx_math=True,
      # Every thread reads what it writes and nothing else; 16 lanes that share
      # a statistic have exchanged values that depend on it before one writes.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
  )(packed, place, view(g), *refs)
  new = [
    jax.freeze(ref).reshape(x.shape)
    for ref, x in zip(refs, in_place, strict=True)
  ]
  if p is None:
    return update.reshape(g.shape), tuple(new)
  new_stored, new_weight = new[: len(stored)], new[len(stored) :]
  return of_weight.unflatten(new_weight), tuple(new_stored)


def _present(codec: GroupCodec) -> tuple[bool, ...]:
  """Which fields of `Encoded` are arrays and not a scalar zero."""
  x = jax.ShapeDtypeStruct((1, GROUP_SIZE), jnp.float32)
  noise = x if codec.needs_noise else None
  return tuple(x.ndim > 0 for x in jax.eval_shape(codec.encode, x, noise))


def _kernel(
  packed_gmem,
  place_gmem,
  g_gmem,
  *gmem,
  names,
  groups,
  shape: tuple[int, ...],
  whole: tuple[int, ...] | None,
  groups_per_layer: int | None,
  present: tuple[tuple[bool, ...], ...],
  on: Instructions,
  num_weights: int,
):
  """One tile.

  Args:
    packed_gmem: f32 [names]; place_gmem: as `_Place` has it; g_gmem: [groups,
      128], of a layer where there is one.
    *gmem: codes [groups, 128] and statistics [groups] of mu and of nu, those
      that are `present`, then the arrays of the parameter, which are
      `num_weights`, or the update, [groups, 128].
  """
  numbers = {name: packed_gmem[i] for i, name in enumerate(names)}
  numbers = _Numbers(**{"eps_root": None, **numbers})
  keys = place_gmem[0], place_gmem[1]
  split, count = sum(present[0]), sum(map(sum, present))
  mu_gmem, nu_gmem, last_gmem = gmem[:split], gmem[split:count], gmem[count:]

  start = lax.axis_index("block") * ROWS
  g = registers.load(g_gmem, start)
  if groups_per_layer is not None:
    layer = place_gmem[place_gmem.shape[0] - 1].astype(jnp.int32)
    start = start + layer * groups_per_layer
  refs = (*last_gmem[:num_weights], *mu_gmem, *nu_gmem)
  rest = [registers.load(ref, start) for ref in refs]
  weight, rest = rest[:num_weights], rest[num_weights:]
  p = weights.in_f32(*weight) if weight else None
  mu_codec, nu_codec = map(moment_codecs.on_registers, groups)
  mu = mu_codec.decode(*_fields(rest[:split], present[0]), True, on)
  nu = nu_codec.decode(*_fields(rest[split:], present[1]), False, on)
  value, mu, nu = _adam(g.astype(jnp.float32), p, mu, nu, numbers, on)

  def draw(key):
    # Only where words are wanted: no layout is found for what is not used.
    return _words(*_row_and_column(start, shape, whole, place_gmem), key)

  if weight:
    values = weights.round_like(last_gmem, value, lambda: draw(keys[1]))
  else:
    values = (value.astype(last_gmem[0].dtype),)
  for ref, out in zip(last_gmem, values, strict=True):
    registers.store(ref, start, out)
  low = high = None
  if any(codec.needs_noise for codec in groups):
    low = draw(keys[0])
    high = low >> 16
  for group, codec, refs, x, noise, signed in (
    (groups[0], mu_codec, mu_gmem, mu, low, True),
    (groups[1], nu_codec, nu_gmem, nu, high, False),
  ):
    noise = noise if group.needs_noise else None
    codes, statistics = codec.encode(x, noise, signed, on)
    written = [codes, *(x for x in statistics if x is not None)]
    for ref, out in zip(refs, written, strict=True):
      registers.store(ref, start, out)


def _fields(loaded, present: tuple[bool, ...]) -> tuple[Array, Statistics]:
  """Codes and statistics, None for those that are not present."""
  codes, *rest = loaded
  amax, range_ = (rest.pop(0) if there else None for there in present[1:])
  return codes, Statistics(amax, range_)


def _adam(g, p, mu, nu, s: _Numbers, on: Instructions):
  """`adam.adam`, and the new parameter if there is one: f32 tiles."""
  if s.grad_scale is not None:
    g = g * s.grad_scale
  # `formats.with_finite_square`; a product and a sum are one instruction, to
  # compare and to select are two, at half its rate. XLA keeps a copy of all
  # gradients for this form, so the definition has the other.
  g = jnp.clip(g, -ROOT_OF_LARGEST, ROOT_OF_LARGEST) + 0.0 * g
  mu = s.b1 * mu + s.one_minus_b1 * g
  nu = s.b2 * nu + s.one_minus_b2 * g * g
  inner = nu if s.eps_root is None else nu + s.eps_root
  update = mu * on.reciprocal(on.sqrt(inner) + s.eps)
  if p is None:
    return update * s.ratio, mu, nu
  assert s.update_rate is not None and s.decay_rate is not None
  return p + (s.update_rate * update + s.decay_rate * p), mu, nu


def _row_and_column(start, shape, whole, place_gmem) -> tuple[Array, Array]:
  """The rows of a tile's groups in the whole leaf, and their first columns."""
  groups_per_row = shape[-1] // GROUP_SIZE
  row = registers.iota(0) + start.astype(jnp.uint32)
  column = jnp.zeros_like(row)
  if groups_per_row > 1:
    row, group = _divide(row, groups_per_row)
    column = group * jnp.uint32(GROUP_SIZE)
  if whole is None:
    return row, column
  begins = [place_gmem[2 + axis] for axis in range(len(shape))]
  rest, row, stride = row, jnp.zeros_like(row), 1
  for axis in range(len(shape) - 2, -1, -1):
    rest, index = _divide(rest, shape[axis]) if axis else (rest, rest)
    row = row + (index + begins[axis]) * jnp.uint32(stride % 2**32)
    stride *= whole[axis]
  return row, column + begins[-1]


def _divide(x: Array, by: int) -> tuple[Array, Array]:
  quotient = lax.div(x, jnp.uint32(by))
  return quotient, x - quotient * jnp.uint32(by)


def _words(row: Array, column: Array, key) -> Array:
  """`stochastic.random_words` of groups at these rows and columns."""
  golden = jnp.uint32(GOLDEN)
  row_word = mix(row * golden + key) + column * golden
  return mix(registers.iota(1) * golden + registers.spread(row_word))
