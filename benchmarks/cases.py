# SPDX-License-Identifier: Apache-2.0
"""Defines the cases of `benchmarks.ops`, and the sizes of layers.

A case calls an operation with the arguments that a layer of a model passes.
`tests/ops/test_conformance.py` uses the same cases, so operations are tested at
the shapes at which they are measured.
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

  Attributes:
    batch, seq, d_model, d_ff, num_heads: sizes of the layer.
    num_kv_heads: number of key heads; None if it equals `num_heads`.
    num_experts: number of experts in a mixture, each as wide as the MLP.
    norm: kind of the norms; a layer norm has a beta.
    dtype: dtype of activations, gradients and norms' parameters.
    group_size: group size of the values that norms and activations read.
    quantized: shape of the matrix for timing quantization alone.
    group_sizes: the group sizes for that matrix.
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
    """The number of rows of activations."""
    return self.batch * self.seq

  @property
  def heads(self) -> tuple[int, int, int, int]:
    """The shape [B, T, N, H] of q."""
    head_dim = self.d_model // self.num_heads
    return self.batch, self.seq, self.num_heads, head_dim

  @property
  def kv_heads(self) -> int:
    """The number of key heads."""
    return self.num_kv_heads or self.num_heads

  @property
  def weights(self) -> dict[str, tuple[int, int]]:
    """The shape [D, F] of each linear layer."""
    d, f = self.d_model, self.d_ff
    return dict(qkv=(d, 3 * d), out=(d, d), gate_up=(d, 2 * f), down=(f, d))

  @property
  def value_bytes(self) -> int:
    """The bytes of one value of an activation."""
    return jnp.dtype(self.dtype).itemsize

  @property
  def grouped_bytes(self) -> float:
    """The bytes of an FP8 value, including its share of a BF16 scale."""
    return 1 + 2 / self.group_size

  def normal(self, *shape: int, seed: int = 0) -> Array:
    """Makes values roughly like those of activations."""
    return jax.random.normal(jax.random.key(seed), shape, self.dtype)

  def grouped(self, *shape: int, seed: int = 0) -> QTensor:
    """Makes values in 1 x G groups."""
    return _grouped(self.normal(*shape, seed=seed), self.group_size)


SMOKE = Sizes(
  batch=2, seq=16, d_model=64, d_ff=96, num_heads=4, quantized=(32, 128)
)
# No width or height is a multiple of a kernel's tile, unless it has to be.
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
# No kernel accepts these: `grouped_wgrad` takes any size, but not f32.
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
    op: the operation's name.
    shape: the keys of a row's `case`, apart from `op`.
    run: `run(implementation, *arrays)` calls the operation.
    num_bytes: fewest bytes that can be read and written, or 0.
    flops: floating-point operations of matmuls, or 0.
    ceiling: the rate to compare with: "copy", "fp8" or "bf16".
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
  """A case of an operation.

  Attributes:
    operation: the operation itself.
    call: `call(op, *arrays)` calls `op`, a function with its signature.
  """

  operation: ops.Op
  call: Callable


def of_op(
  op: ops.Op,
  shape: dict,
  arrays,
  call,
  implementations: tuple[str, ...] | None = None,
  **cost,
) -> OpCase:
  """Makes a case of an operation; None stands for all implementations."""

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
  """Makes an operand in both layouts."""
  how = dict(layout="both", implementation="xla")
  return ops.quantize_tensor(x, scaling=ops.PerTensor(dtype), **how)
