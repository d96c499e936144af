# SPDX-License-Identifier: Apache-2.0
"""The two ends of a decoder, which have the vocabulary: embedding and loss.

On a mesh (`axes`) each device works on its own tokens. What moves between
devices is written out, for XLA's own plan would move logits or, chunk by chunk,
gradients:

  embedding   its rows are gathered once, in the dtype of activations
  head        its rows over fsdp likewise; along tensor a device keeps its part
              of the vocabulary and sees whole sequences, and a token's loss is
              put together of three numbers from each part
  gradients   are summed once, in `axes.grad_dtype`; each device keeps its part
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, P, lax
from jax.typing import DTypeLike

from coat_jax.mesh_axes import MeshAxes

# Positions whose logits are held at a time.
LOSS_CHUNK = 256


def embed(
  tokens: Array, table: Array, *, dtype: DTypeLike, axes: MeshAxes | None
) -> Array:
  """Looks tokens up.

  Args:
    tokens: int32 [B, T].
    table: [V, D]; on a mesh, rows split over tensor and fsdp.
    dtype: of activations.
    axes: of the mesh, or None.

  Returns:
    [B, T, D] in `dtype`.
  """
  if axes is None:
    return table.astype(dtype)[tokens]
  names = _present(axes.tensor, axes.fsdp)

  def local(tokens, table):
    return _gather_rows(table, dtype, names, axes)[tokens]

  where = P(axes.batch, axes.tensor)
  return jax.shard_map(local, in_specs=(where, P(names)), out_specs=where)(
    tokens, table
  )


def mean_loss(
  hidden: Array,
  targets: Array,
  weight: Array,
  *,
  is_tied: bool,
  axes: MeshAxes | None,
) -> Array:
  """Mean cross-entropy of the next token.

  Logits are computed for `LOSS_CHUNK` positions of all sequences at a time and
  again in the backward, so that [B, T, V] is never held. Chunks run along the
  sequence axis: chunks of flattened tokens would gather a sharded batch.

  Args:
    hidden: [B, T, D].
    targets: int32 [B, T].
    weight: [D, V]; or [V, D] where it is the embedding's.
    is_tied: whether it is.
    axes: of the mesh, or None.

  Returns:
    f32 scalar, nats per token.
  """
  dtype = hidden.dtype
  if axes is None:
    weight = weight.astype(dtype)
    total = _sum_of_nats(hidden, targets, weight.T if is_tied else weight)
    return total / targets.size

  def local(hidden, targets, weight):
    weight = _gather_rows(weight, dtype, _present(axes.fsdp), axes)
    weight = weight.T if is_tied else weight
    if axes.tensor is not None:
      hidden = lax.all_gather(hidden, axes.tensor, axis=1, tiled=True)
    total = _sum_of_nats(hidden, targets, weight, axes.tensor)
    return lax.psum(total, axes.batch)

  rows = P(_present(axes.tensor, axes.fsdp)) if is_tied else None
  total = jax.shard_map(
    local,
    in_specs=(
      P(axes.batch, axes.tensor),
      P(axes.batch),
      rows or P(axes.fsdp, axes.tensor),
    ),
    out_specs=P(),
  )(hidden, targets, weight)
  return total / targets.size


def _sum_of_nats(
  hidden: Array, targets: Array, weight: Array, tensor: str | None = None
) -> Array:
  """The sum over tokens; with `tensor`, weight is a part of the vocabulary."""
  batch, length = targets.shape
  chunk = min(LOSS_CHUNK, length)
  padding = -length % chunk
  hidden = jnp.pad(hidden, [(0, 0), (0, padding), (0, 0)])
  counted = jnp.pad(jnp.ones_like(targets), [(0, 0), (0, padding)])
  targets = jnp.pad(targets, [(0, 0), (0, padding)])

  @jax.checkpoint
  def chunk_sum(chunk_of):
    hidden, targets, counted = chunk_of
    logits = jnp.einsum(
      "btd,dv->btv", hidden, weight, preferred_element_type=jnp.float32
    )
    return jnp.sum(_nats(logits, targets, tensor) * counted)

  chunks = jax.tree.map(
    lambda x: jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0),
    (hidden, targets, counted),
  )
  return jnp.sum(lax.map(chunk_sum, chunks))


def _nats(logits: Array, targets: Array, tensor: str | None) -> Array:
  """-log softmax at the targets: f32 [B, T]."""
  if tensor is None:
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - at_target[..., 0]
  largest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), tensor)
  others = jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
  size = logits.shape[-1]
  targets = targets - size * lax.axis_index(tensor)
  at_target = jnp.take_along_axis(
    logits, jnp.clip(targets, 0, size - 1)[..., None], axis=-1
  )
  is_here = (targets >= 0) & (targets < size)
  at_target = jnp.where(is_here, at_target[..., 0], 0)
  others, at_target = lax.psum((others, at_target), tensor)
  return jnp.log(others) + largest - at_target


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_rows(
  weight: Array, dtype: DTypeLike, names: tuple[str, ...], axes: MeshAxes
) -> Array:
  """All rows, in `dtype`, of an f32 weight of which a device has a part."""
  rows = lax.all_gather(weight.astype(dtype), names, axis=0, tiled=True)
  # From here on each device has its own: its gradient is summed below, not
  # where it is first used.
  return lax.pcast(rows, _others(names, axes), to="varying")


def _gather_rows_fwd(weight, dtype, names, axes):
  return _gather_rows(weight, dtype, names, axes), None


def _gather_rows_bwd(dtype, names, axes, residuals, g):
  del dtype, residuals
  g = g.astype(axes.grad_dtype)
  g = lax.psum_scatter(g, names, scatter_dimension=0, tiled=True)
  return (lax.psum(g, _others(names, axes)).astype(jnp.float32),)


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


def _others(names: tuple[str, ...], axes: MeshAxes) -> tuple[str, ...]:
  """Axes along which devices have other sequences and the same rows."""
  return tuple(name for name in axes.batch if name not in names)


def _present(*names: str | None) -> tuple[str, ...]:
  return tuple(name for name in names if name is not None)
