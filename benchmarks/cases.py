# SPDX-License-Identifier: Apache-2.0
"""What a case of `benchmarks.ops` is, and the arrays that cases are made of."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.formats import E4M3
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor

GROUP_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
  """A Llama-2 7B layer, and the matrix that bare quantization is timed on."""

  batch: int = 4
  seq: int = 2048
  d_model: int = 4096
  d_ff: int = 11008
  num_heads: int = 32
  quantized: tuple[int, int] = (8192, 16384)

  @property
  def tokens(self) -> int:
    """Rows of activations."""
    return self.batch * self.seq

  @property
  def heads(self) -> tuple[int, int, int, int]:
    """Shape [B, T, N, H] of q, k and v."""
    head_dim = self.d_model // self.num_heads
    return self.batch, self.seq, self.num_heads, head_dim

  @property
  def weights(self) -> dict[str, tuple[int, int]]:
    """[D, F] of each linear layer."""
    d, f = self.d_model, self.d_ff
    return dict(qkv=(d, 3 * d), out=(d, d), gate_up=(d, 2 * f), down=(f, d))


SMOKE = Sizes(
  batch=2, seq=16, d_model=64, d_ff=96, num_heads=4, quantized=(32, 128)
)


@dataclasses.dataclass(frozen=True)
class Case:
  """One operation at one shape.

  Attributes:
    op: its name.
    shape: what else names the case in a row.
    run: called with one of `implementations`, then with the `arrays`.
    num_bytes: least that are read and written, or 0.
    flops: of matrix products, or 0.
    ceiling: rate to compare with, "copy", "fp8" or "bf16".
  """

  op: str
  shape: dict
  run: Callable
  arrays: Callable[[], tuple]
  implementations: tuple[str, ...]
  num_bytes: float = 0
  flops: float = 0
  ceiling: str = "copy"


def of_op(op: ops.Op, shape: dict, arrays, call, **cost) -> Case:
  """A case of `call(op with an implementation, *arrays)`."""

  def run(implementation, *args):
    return call(functools.partial(op, implementation=implementation), *args)

  return Case(op.name, shape, run, arrays, op.implementations, **cost)


def normal(*shape: int, seed: int = 0) -> Array:
  """BF16 values as activations have them, about."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@jax.jit
def grouped(x: Array) -> QTensor:
  """1 x G values."""
  return ops.quantize_groups(x, group_size=GROUP_SIZE, implementation="xla")


@functools.partial(jax.jit, static_argnames="dtype")
def operand(x: Array, dtype: DTypeLike = E4M3) -> Operand:
  """An operand in both layouts."""
  how = dict(layout="both", implementation="xla")
  return ops.quantize_tensor(x, dtype=dtype, **how)
