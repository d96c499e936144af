# SPDX-License-Identifier: Apache-2.0
"""A ring of slots in shared memory, to load tiles ahead of their use."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
  """Slots of shared memory that one warpgroup fills in round-robin order.

  Loads are numbered from 0.
  """

  slots: tuple[Any, ...]  # Arrays [stages, ...] that are filled together.
  loaded: Any  # A barrier per slot: completes when the slot is filled.
  free: Any  # A barrier per slot: completes when all readers have released it.

  @classmethod
  def types(cls, slots: tuple, *, readers: int) -> "Ring":
    """Returns the types of a ring that `readers` warpgroups read."""
    stages = slots[0].shape[0]
    return cls(
      slots,
      plgpu.Barrier(num_arrivals=len(slots), num_barriers=stages),
      plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
    )

  @property
  def stages(self) -> int:
    return self.slots[0].shape[0]

  def load(self, number: Array, *sources) -> None:
    """Waits until the slot is free, then starts to copy arrays into it."""
    slot = lax.rem(number, jnp.int32(self.stages))
    self.wait_for_free(number)
    for source, smem in zip(sources, self.slots, strict=True):
      plgpu.copy_gmem_to_smem(source, smem.at[slot], self.loaded.at[slot])

  def wait_for_free(self, number: Array) -> None:
    """Waits until the slot for this load has been released."""
    slot = lax.rem(number, jnp.int32(self.stages))
    is_used = number >= self.stages
    pl.when(is_used)(lambda: plgpu.barrier_wait(self.free.at[slot]))

  def drain(self, number: Array) -> None:
    """Waits until all slots are free; the interpreter needs this at the end."""
    wait = lambda i, _: self.wait_for_free(number + i)  # noqa: E731
    lax.fori_loop(0, self.stages, wait, None)

  def read(self, number: Array) -> list:
    """Waits for a load and returns its arrays."""
    self.wait(number)
    return self.at(number)

  def wait(self, number: Array) -> None:
    """Waits for a load."""
    slot = lax.rem(number, jnp.int32(self.stages))
    plgpu.barrier_wait(self.loaded.at[slot])

  def at(self, number: Array) -> list:
    """Returns the arrays of a load that has been waited for."""
    slot = lax.rem(number, jnp.int32(self.stages))
    return [smem.at[slot] for smem in self.slots]

  def release(self, number: Array, interpret: bool) -> None:
    """Lets a slot be filled again."""
    if interpret:
      # Without this fence, the interpreter reports a race with the next copy.
      plgpu.commit_smem()
    plgpu.barrier_arrive(self.free.at[lax.rem(number, jnp.int32(self.stages))])
