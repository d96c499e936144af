# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's scale from the maxima of its parts, in one launch.

A kernel that looks for a tensor's largest magnitude writes the bits of one
maximum per program. To compute a scale from them, XLA would launch two or three
kernels, and the GPU would idle for some microseconds in each. Here one program
of the backend computes it.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.qtensor import amax_to_scale, bits_to_amax
from coat_jax.numerics.scaling import PerTensor, Scaling


@dataclasses.dataclass(frozen=True)
class ScaleFinder:
  """Finds scales with a backend's kernel.

  Attributes:
    kernel: `kernel(bits, dtype, count, interpret)` returns the scale of int32
      `bits` `count` times, f32 [count].
    most: the largest number of maxima that the kernel takes; None for any.
  """

  kernel: Callable[[Array, DTypeLike, int, bool], Array]
  most: int | None = None

  def scale(self, bits: Array, scaling: Scaling, interpret: bool) -> Array:
    """Returns the scale, f32 [], from maxima."""
    return self._scale_and_copies(bits, scaling, 1, interpret)[0]

  def output_scale(
    self, bits: Array, output: Scaling, interpret: bool
  ) -> Array | None:
    """Returns `scale`, or None for blocks, which find their own."""
    if type(output) is not PerTensor:
      return None
    return self.scale(bits, output, interpret)

  def shared_scale(
    self, bits: Array, scaling: Scaling, interpret: bool
  ) -> tuple[Array, Array]:
    """Returns `scale`, and an array f32 [k] that begins with the scale.

    Use both if two products read the operand. Each product is multiplied by
    this scale and by the other operand's. XLA fuses both multiplications into
    one launch if they read the same array, but not if that array is a scalar.
    """
    return self._scale_and_copies(bits, scaling, 2, interpret)

  def _scale_and_copies(
    self, bits: Array, scaling: Scaling, count: int, interpret: bool
  ) -> tuple[Array, Array]:
    is_many = self.most is not None and bits.size > self.most
    # The devices of a mesh compare their maxima before there is a scale.
    if scaling.axis_names or is_many:
      amax = bits_to_amax(bits, scaling.axis_names)
      scale = amax_to_scale(amax, scaling.dtype)
      return scale, scale.reshape(1)
    scales = self.kernel(bits, jnp.dtype(scaling.dtype), count, interpret)
    return scales[0], scales
