# SPDX-License-Identifier: Apache-2.0
"""Defines classes for benchmark cases (`benchmarks.ops`) and layer sizes.

A case calls an operation with arguments like those that a layer passes.
`tests/ops/test_conformance.py` tests the operations with the same cases.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Operand


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of a layer, by default of Llama-2-7B.

  An MLP and each expert have width `d_ff`. Activations, gradients and the
  parameters of norms have dtype `dtype`. `elementwise_cases` quantizes a matrix
  of shape `quantized`, once for each group size in `group_sizes`.
  """

  batch: int = 4
  seq: int = 2048
  d_model: int = 4096
  d_ff: int = 11008
  num_heads: int = 32
  num_kv_heads: int | None = None
  num_experts: int = 8
  norm: ops.NormKind = "rms"
  dtype: DTypeLike = jnp.bfloat16
  group_size: int = 16
  quantized: tuple[int, int] = (8192, 16384)
  group_sizes: tuple[int, ...] = (16, 128)

  @property
  def tokens(self) -> int:
    """The number of tokens, which is the number of rows of activations."""
    return self.batch * self.seq

  @property
  def heads(self) -> tuple[int, int, int, int]:
    """The shape of q: [batch, seq, heads, head_dim]."""
    head_dim = self.d_model // self.num_heads
    return self.batch, self.seq, self.num_heads, head_dim

  @property
  def kv_heads(self) -> int:
    """The number of key and value heads."""
    return self.num_kv_heads or self.num_heads

  @property
  def weights(self) -> dict[str, tuple[int, int]]:
    """The shape [inputs, outputs] of each linear layer's weight."""
    d, f = self.d_model, self.d_ff
    return dict(qkv=(d, 3 * d), out=(d, d), gate_up=(d, 2 * f), down=(f, d))

  @property
  def value_bytes(self) -> int:
    """The number of bytes per value of an activation."""
    return jnp.dtype(self.dtype).itemsize

  @property
  def grouped_bytes(self) -> float:
    """The bytes per FP8 value, including its share of a group's BF16 scale."""
    return 1 + 2 / self.group_size

  def normal(self, *shape: int, seed: int = 0) -> Array:
    """Samples values from a normal distribution, similar to activations."""
    return jax.random.normal(jax.random.key(seed), shape, self.dtype)

  def grouped(self, *shape: int, seed: int = 0) -> QTensor:
    """Samples FP8 values with one scale per group of 1 x `group_size`."""
    return _grouped(self.normal(*shape, seed=seed), self.group_size)


SMOKE = Sizes(
  batch=2, seq=16, d_model=64, d_ff=96, num_heads=4, quantized=(32, 128)
)
# Most of these sizes are not multiples of a kernel's tile size.
UNEVEN = Sizes(
  batch=1,
  seq=48,
  d_model=160,
  d_ff=224,
  num_heads=5,
  num_kv_heads=1,
  norm="layer",
  dtype=jnp.float32,
  group_size=32,
  quantized=(48, 672),
  group_sizes=(32,),
)
# No kernel supports a case with these sizes. Most kernels do not support the
# shapes. Three kernels do not support the dtype: f32 in `grouped_wgrad`, and
# E5M2 in `quantize_rows` and `quantize_experts`.
ODD = Sizes(
  batch=1,
  seq=3,
  d_model=12,
  d_ff=10,
  num_heads=2,
  dtype=jnp.float32,
  num_experts=2,
  quantized=(3, 10),
  group_sizes=(16,),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """An operation to measure at one shape.

  Attributes:
    op, shape: The operation's name, and labels such as the array sizes. They
      become `case` in the benchmark's output row.
    run: `run(implementation, *arrays())` calls the operation.
    num_bytes: The fewest bytes that the operation must read and write; used
      only if `flops` is 0.
    flops: Number of floating-point operations in matmuls; 0 if there are none.
    ceiling: The device's best rate to compare with: "copy", "fp8" or "bf16".
  """

  op: str
  shape: dict
  run: Callable
  arrays: Callable[[], tuple]
  implementations: tuple[str, ...]
  num_bytes: float = 0
  flops: float = 0
  ceiling: str = "copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase(Case):
  """A case of an `ops.Op`."""

  operation: ops.Op
  # `call(fn, *arrays)` calls a function with the signature of `operation`.
  call: Callable


def of_op(
  op: ops.Op,
  shape: dict,
  arrays,
  call,
  implementations: tuple[str, ...] | None = None,
  **cost,
) -> OpCase:
  """Builds a case of `op`, by default with all implementations."""

  def run(implementation, *args):
    return call(functools.partial(op, implementation=implementation), *args)

  return OpCase(
    op.name,
    shape,
    run,
    arrays,
    implementations or op.implementations,
    operation=op,
    call=call,
    **cost,
  )


@functools.partial(jax.jit, static_argnums=1)
def _grouped(x: Array, group_size: int) -> QTensor:
  return ops.quantize_groups(
    x, groups=ops.Groups(group_size), implementation="xla"
  )


@functools.partial(jax.jit, static_argnames="dtype")
def operand(x: Array, dtype: DTypeLike = E4M3) -> Operand:
  """Quantizes a matrix to an FP8 operand, in rows and in columns."""
  how = dict(layout="both", implementation="xla")
  return ops.quantize_tensor(x, scaling=ops.PerTensor(dtype), **how)
