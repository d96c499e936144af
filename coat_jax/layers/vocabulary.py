# SPDX-License-Identifier: Apache-2.0
"""The two ends of a decoder that use the vocabulary: embedding and loss.

On a mesh (`axes`), each device works on its shard of the tokens. Left to
itself, XLA would exchange logits, or reduce the gradients of each chunk of the
loss separately. Collectives are therefore explicit:

  tables      All rows of an embedding table are gathered once.
  head        Rows that are split over fsdp are gathered. Along the tensor axis,
              each device keeps its shard of the vocabulary and gathers whole
              sequences. For each token, devices combine only a maximum, a sum
              of exponentials and the target's logit.
  gradients   The gradients of the tables and the head are summed once, in
              `axes.grad_dtype`. Each device keeps its shard.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P, lax
from jax.typing import DTypeLike

from coat_jax.mesh import (
  axes_in,
  gather_positions,
  run_on_shards,
  run_whole,
  scatter_sequence,
  spec_of,
  split_inputs,
  sum_tokens,
)
from coat_jax.numerics.varying import varying
from coat_jax.recipes import MeshAxes

# Limit in bytes for a chunk's f32 logits; a chunk has at least one position.
LOGITS_BYTES = 2**28


def embed(
  tokens: Array, table: Array, *, dtype: DTypeLike, axes: MeshAxes | None
) -> Array:
  """Looks up tokens [B, T] in a table [V, D]; returns [B, T, D] in `dtype`.

  As with `nnx.Embed`, ids of V or more give NaN, and negative ids count from
  the end of the table.
  """
  look_up = lambda rows, tokens: jnp.take(rows, tokens, axis=0)  # noqa: E731
  return _with_rows(look_up, table, dtype, (tokens,), axes)


def add_positions(
  x: Array, places: Array, table: Array, *, axes: MeshAxes | None
) -> Array:
  """Adds learned position embeddings, table[places], to x [B, T, D].

  `places` is int32, [T] or [B, T]. The sum is computed in f32 and returned in
  x's dtype.
  """

  def added(rows, x, places):
    rows = jnp.take(rows, places, axis=0)
    rows = rows if places.ndim == 2 else rows[None]
    return (x.astype(jnp.float32) + rows).astype(x.dtype)

  return _with_rows(added, table, jnp.float32, (x, places), axes)


def _with_rows(
  f: Callable,
  table: Array,
  dtype: DTypeLike,
  arrays: tuple[Array, ...],
  axes: MeshAxes | None,
) -> Array:
  """Runs f(rows, *arrays) with all rows of a table; returns [B, T, D].

  On a mesh the table's rows are split over tensor and fsdp.
  """
  if axes is None:
    local = lambda table, *arrays: f(table.astype(dtype), *arrays)  # noqa: E731
    return run_whole(local, table, *arrays, out_specs=spec_of(arrays[0]))
  rows_spec = split_inputs(axes)
  names = axes_in(rows_spec)

  def on_shard(table, *arrays):
    # Cast first: the summed gradient is then f32 and rounded only once.
    rows = _gather_rows(table.astype(jnp.float32), dtype, names, axes)
    return f(rows, *arrays)

  where = P(axes.batch, axes.tensor)
  specs = (where if x.ndim > 1 else P(axes.tensor) for x in arrays)
  return run_on_shards(
    on_shard,
    table,
    *arrays,
    in_specs=(rows_spec, *specs),
    out_specs=where,
    check_vma=True,
  )


def mean_loss(
  hidden: Array,
  targets: Array,
  weight: Array,
  shares: Array | None = None,
  *,
  is_tied: bool,
  axes: MeshAxes | None,
  soft_cap: float | None = None,
) -> Array:
  """Computes the mean cross-entropy of the next token, f32, in nats per token.

  hidden is [B, T, D], and targets are int32 [B, T]. weight is [D, V], or [V, D]
  if it is the embedding (`is_tied`). Each token's loss is multiplied by its
  share, and the sum is returned. `shares` are constants, f32 [B, T]; None means
  1 / (B T) for all tokens. If a target with a nonzero share is not an id from 0
  to V - 1, the result is NaN.
  With `soft_cap`, logits become soft_cap * tanh(logits / soft_cap).

  Large logits [B, T, V] are never all in memory at once: the forward pass
  computes one chunk of positions at a time. If the loss is differentiated, the
  forward pass also computes the gradients, and the backward pass only scales
  these gradients.
  """
  if targets.size == 0:
    raise ValueError(
      "mean_loss: the mean needs at least one target, got targets of shape "
      f"{targets.shape}; skip such a batch"
    )
  # Differentiate a sum in which each token's factor is about 1, and scale at
  # the end. The gradients of a mean over many tokens could underflow in
  # float16. A loss scale would come too late: it is applied in the backward
  # pass, but the forward pass computes these gradients.
  if shares is None:
    unit = 1 / targets.size
  else:
    # Scale by a power of two, which is exact.
    largest = jnp.max(jnp.abs(shares), initial=0)
    unit = jnp.ldexp(0.5, jnp.frexp(largest)[1])
    shares = shares / unit
  # Cast a float16 weight to f32, so that dweight is f32 too: its sum over many
  # tokens could overflow in float16.
  weight = weight.astype(jnp.promote_types(weight.dtype, jnp.bfloat16))
  arrays = hidden, targets, weight, shares
  if axes is None:
    arrays = varying(arrays)
  loss: Any = _mean_loss(*arrays, _Head(is_tied, axes, soft_cap))
  return unit * loss


def logits(
  hidden: Array,
  weight: Array,
  *,
  is_tied: bool,
  axes: MeshAxes | None,
  soft_cap: float | None = None,
) -> Array:
  """Computes f32 logits [B, T, V]; for the arguments see `mean_loss`.

  With `axes`, the logits are sharded over the batch and the vocabulary.
  """

  def product(hidden, weight):
    weight = weight.astype(hidden.dtype)
    return _logits(hidden, weight, _Head(is_tied, axes, soft_cap))

  if axes is None:
    out_specs = P(*spec_of(hidden)[:2])
    return run_whole(product, hidden, weight, out_specs=out_specs)
  where = P(axes.batch, None, axes.tensor)
  return lax.with_sharding_constraint(product(hidden, weight), where)


class _Head(NamedTuple):
  """The static arguments of `mean_loss`."""

  is_tied: bool
  axes: MeshAxes | None
  soft_cap: float | None

  @property
  def weight_axes(self) -> str:
    """The weight's axes in an einsum."""
    return "vd" if self.is_tied else "dv"


def _logits(hidden: Array, weight: Array, head: _Head) -> Array:
  """Computes logits in f32 and, if there is a soft cap, applies it."""
  # Read a tied weight as it is stored. Otherwise the scan over chunks would
  # copy its transpose to memory.
  logits = jnp.einsum(
    f"btd,{head.weight_axes}->btv",
    hidden,
    weight,
    preferred_element_type=jnp.float32,
  )
  if head.soft_cap is None:
    return logits
  return head.soft_cap * jnp.tanh(logits / head.soft_cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mean_loss(hidden, targets, weight, shares, head):
  arrays = hidden, targets, weight, shares
  return _on_devices(*arrays, head, has_gradients=False)[0]


def _mean_loss_fwd(*args):
  return _on_devices(*args, has_gradients=True)


def _mean_loss_bwd(head, gradients, g):
  del head
  dhidden, dweight = ((g * x).astype(x.dtype) for x in gradients)
  return dhidden, None, dweight, None


_mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


def _on_devices(hidden, targets, weight, shares, head, *, has_gradients):
  """Returns the loss of all devices' tokens, and (dhidden, dweight) or ()."""
  arrays, axes = (hidden, targets, weight, shares), head.axes
  local = functools.partial(
    _loss_of_shard, head=head, has_gradients=has_gradients
  )
  if axes is None:
    gradients = (spec_of(hidden), spec_of(weight)) if has_gradients else ()
    return run_whole(local, *arrays, out_specs=(P(), gradients))
  tokens = P(axes.batch, axes.tensor)
  rows = split_inputs(axes) if head.is_tied else P(axes.fsdp, axes.tensor)
  return run_on_shards(
    local,
    *arrays,
    in_specs=(tokens, P(axes.batch), rows, P(axes.batch)),
    out_specs=(P(), (tokens, rows) if has_gradients else ()),
  )


def _loss_of_shard(hidden, targets, weight, shares, *, head, has_gradients):
  """Computes the results of `_on_devices` from a device's shards."""
  axes, weight_dtype = head.axes, weight.dtype
  weight = weight.astype(hidden.dtype)
  if axes is not None:
    weight = lax.all_gather(weight, axes_in([axes.fsdp]), axis=0, tiled=True)
  hidden = gather_positions(hidden, axes)
  add = functools.partial(
    _add_chunk, weight, head=head, has_gradients=has_gradients
  )
  d, vocab_size = weight.shape[::-1] if head.is_tied else weight.shape
  # In shard_map, these zeros vary over the same mesh axes as `hidden`.
  zeros = functools.partial(jnp.zeros_like, hidden, jnp.float32)
  start = zeros(shape=()), zeros(shape=weight.shape if has_gradients else ())
  counted = jnp.ones(targets.shape, jnp.float32) if shares is None else shares
  num_ids = vocab_size
  if axes is not None and axes.tensor is not None:
    num_ids *= lax.axis_size(axes.tensor)
  # `num_ids` might be too large for a narrow dtype.
  targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
  is_id = (targets >= 0) & (targets < num_ids)
  counted = jnp.where(is_id | (counted == 0), counted, jnp.nan)
  chunks = _chunks(hidden, targets, counted, vocab_size)
  (loss, dweight), dhidden = lax.scan(add, start, chunks)
  loss = sum_tokens(loss, axes, all_positions=True)
  if not has_gradients:
    return loss, ()
  assert dhidden is not None  # The scan stacked one dhidden per chunk.
  dhidden = jnp.moveaxis(dhidden, 0, 1).reshape(len(hidden), -1, d)
  dhidden = scatter_sequence(dhidden[:, : hidden.shape[1]], axes)
  if axes is None:
    return loss, (dhidden, dweight.astype(weight_dtype))
  dweight = _sum_rows(dweight, axes_in([axes.fsdp]), axes).astype(weight_dtype)
  # Without this barrier XLA postpones the sums, and holds unsummed gradients
  # through the whole backward pass.
  return loss, lax.optimization_barrier((dhidden, dweight))


def loss_positions(batch: int, length: int, vocab_size: int) -> int:
  """Returns how many of `length` positions one chunk of the loss contains."""
  most = max(LOGITS_BYTES // (4 * vocab_size * batch), 1)
  return -(-length // -(-length // most))


def _chunks(hidden: Array, targets: Array, counted: Array, vocab_size: int):
  """Pads and splits arrays [B, T, ...] into [chunks, B, positions, ...]."""
  batch, length = targets.shape
  positions = loss_positions(batch, length, vocab_size)
  count = -(-length // positions)
  padding = count * positions - length

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, count, positions, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  return split(hidden), split(targets), split(counted)


def _add_chunk(weight, total, chunk, *, head, has_gradients):
  """Adds a chunk's loss and dweight to `total`; also returns its dhidden."""
  (loss, dweight), (hidden, targets, counted) = total, chunk
  is_tied, mesh_axes, soft_cap = head
  tensor = None if mesh_axes is None else mesh_axes.tensor
  logits = _logits(hidden, weight, head)
  largest = jnp.max(logits, axis=-1)
  size = logits.shape[-1]
  if tensor is not None:
    largest = lax.pmax(largest, tensor)
    targets = targets - size * lax.axis_index(tensor)
  is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  is_target = is_target == targets[..., None]
  others = jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
  at_target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
  if tensor is not None:
    others, at_target = lax.psum((others, at_target), tensor)
  log_sum = jnp.log(others) + largest
  loss = loss + jnp.sum((log_sum - at_target) * counted)
  if not has_gradients:
    return (loss, dweight), None
  softmax = jnp.exp(logits - log_sum[..., None])
  dlogits = (softmax - is_target) * counted[..., None]
  if soft_cap is not None:
    dlogits = dlogits * (1 - jnp.square(logits / soft_cap))
  dlogits = dlogits.astype(weight.dtype)
  dhidden = jnp.einsum(f"btv,{head.weight_axes}->btd", dlogits, weight)
  # Compute dweight in the weight's layout, because XLA has no transposed BF16
  # matmul on a CPU.
  factors = (dlogits, hidden) if is_tied else (hidden, dlogits)
  dweight = dweight + jnp.einsum(
    "bti,btj->ij", *factors, preferred_element_type=jnp.float32
  )
  return (loss, dweight), dhidden


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_rows(
  weight: Array, dtype: DTypeLike, names: tuple[str, ...], axes: MeshAxes
) -> Array:
  """Casts each device's f32 rows to `dtype` and gathers them."""
  rows = lax.all_gather(weight.astype(dtype), names, axis=0, tiled=True)
  # Mark the copies as varying. Otherwise JAX would sum the gradient before
  # `_gather_rows_bwd`.
  return lax.pcast(rows, _others(names, axes), to="varying")


def _gather_rows_fwd(weight, dtype, names, axes):
  return _gather_rows(weight, dtype, names, axes), None


def _gather_rows_bwd(dtype, names, axes, residuals, g):
  del dtype, residuals
  return (_sum_rows(g, names, axes),)


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


def _sum_rows(g: Array, names: tuple[str, ...], axes: MeshAxes) -> Array:
  """Sums gradients over devices; returns this device's rows in f32."""
  g = g.astype(axes.grad_dtype)
  g = lax.psum_scatter(g, names, scatter_dimension=0, tiled=True)
  return lax.psum(g, _others(names, axes)).astype(jnp.float32)


def _others(names: tuple[str, ...], axes: MeshAxes) -> tuple[str, ...]:
  """Returns the mesh axes that split the batch but not the rows."""
  return tuple(name for name in axes.batch if name not in names)
