# SPDX-License-Identifier: Apache-2.0
"""Exchanges rows of tokens with the devices that hold their experts.

With `MeshAxes.expert`, each of n devices holds E / n of the E experts. Before
the exchange, a device has T k rows: k copies of each of its T tokens, sorted by
expert. After the exchange, it has the rows that all n devices sent to its
experts, sorted by expert, then by sender. For device 0 of n = 2:

  sends      | expert 0 | expert 1 | expert 2 | expert 3 |
             to device 0 ----------  to device 1 --------
  receives   | expert 0, from 0 | from 1 | expert 1, from 0 | from 1 | unused

The receive buffer has R = n T k rows, which suffices even if all tokens choose
experts on the same device. Unused rows at the end are zero.

TPUs and supported GPUs send only actual rows (`lax.ragged_all_to_all`). On
other devices, such as CPUs, XLA lacks this operation. There, each device sends
T k rows, padded with zeros, to every device (`lax.all_to_all`).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.ops.dispatch import target


class Slices(NamedTuple):
  """E slices of the rows that a device sends or receives.

  A slice contains the rows for one expert that go to, or come from, one peer
  device. Slices are sorted by peer, then by expert. Fields are int32 [E].

  Attributes:
    sizes: the number of rows in each slice.
    begins: the index of each slice's first row on this device.
    begins_there: the index of each slice's first row on the peer.
  """

  sizes: Array
  begins: Array
  begins_there: Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["own", "received"],
  meta_fields=["axis", "num_own"],
)
@dataclasses.dataclass(frozen=True)
class Exchange:
  """A plan to send a device's rows to their experts, and back."""

  own: Slices
  received: Slices
  axis: str
  num_own: int  # T k


def plan_exchange(
  sizes: Array, num_own: int, axis: str
) -> tuple[Exchange, Array]:
  """Plans the exchange of a device's rows; `sizes` [E] counts them by expert.

  Also returns how many rows each expert on this device receives, [E / n].
  """
  devices, device = lax.axis_size(axis), lax.axis_index(axis)
  counts = lax.all_gather(sizes, axis)  # [n, E]
  begins = _before(counts, axis=1)
  each = jnp.sum(counts, axis=0).reshape(devices, -1)
  begins_sent = _before(each, axis=1).reshape(1, -1) + _before(counts, axis=0)

  def from_all(a):
    """Selects the columns of this device's experts in [n, E]; returns [E]."""
    a = a.reshape(devices, devices, -1)
    return lax.dynamic_index_in_dim(a, device, 1, keepdims=False).reshape(-1)

  own = Slices(counts[device], begins[device], begins_sent[device])
  received = Slices(*map(from_all, (counts, begins_sent, begins)))
  return Exchange(own, received, axis, num_own), each[device]


@jax.custom_vjp
def send_rows(x: Array, exchange: Exchange) -> Array:
  """Sends a device's rows [T k, ...]; returns the rows it receives [R, ...]."""
  rows = exchange.num_own * lax.axis_size(exchange.axis)
  return _move(x, rows, exchange.own, exchange.received, exchange)


@jax.custom_vjp
def send_back(x: Array, exchange: Exchange) -> Array:
  """Inverts `send_rows`: sends rows [R, ...] back, returns [T k, ...]."""
  rows = exchange.num_own
  return _move(x, rows, exchange.received, exchange.own, exchange)


# Each function is the other's transpose.
send_rows.defvjp(
  lambda x, exchange: (send_rows(x, exchange), exchange),
  lambda exchange, g: (send_back(g, exchange), None),
)
send_back.defvjp(
  lambda x, exchange: (send_back(x, exchange), exchange),
  lambda exchange, g: (send_rows(g, exchange), None),
)


def _move(x, num_rows: int, sent: Slices, found: Slices, exchange: Exchange):
  """Moves slices of x to other devices."""
  out = jnp.zeros((num_rows, *x.shape[1:]), x.dtype)
  if target() is not None:
    return lax.ragged_all_to_all(
      x,
      out,
      sent.begins,
      sent.sizes,
      sent.begins_there,
      found.sizes,
      axis_name=exchange.axis,
    )
  to_send = _padded_index(sent, exchange, len(x))
  x = x.at[to_send].get(mode="fill", fill_value=0)
  x = lax.all_to_all(x, exchange.axis, 0, 0, tiled=True)
  return out.at[_padded_index(found, exchange, num_rows)].set(x, mode="drop")


def _padded_index(slices: Slices, exchange: Exchange, num_rows: int) -> Array:
  """Returns the indices of each peer's rows, [n, T k]; pads with `num_rows`."""
  devices = lax.axis_size(exchange.axis)
  sizes, begins = (a.reshape(devices, -1) for a in slices[:2])
  places = jnp.arange(exchange.num_own, dtype=jnp.int32)

  def of_device(sizes, begins):
    ends = jnp.cumsum(sizes)
    i = jnp.searchsorted(ends, places, side="right")
    row = jnp.take(begins - (ends - sizes), i, mode="clip") + places
    return jnp.where(places < ends[-1], row, num_rows)

  return jax.vmap(of_device)(sizes, begins)


def _before(a: Array, axis: int) -> Array:
  """Computes an exclusive cumulative sum along an axis."""
  return jnp.cumsum(a, axis) - a
