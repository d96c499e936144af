# SPDX-License-Identifier: Apache-2.0
"""Lists the memory-bound cases of `benchmarks.ops`, except those of MoE layers.

`num_bytes` counts the bytes of the matrices that an operation must read and
write, but not the bytes of vectors. An input counts twice if the operation must
read it twice: first to compute the result's scale, then to compute the result.
Examples are `quantize_tensor` without a given scale, and dy and
the scales in `activation_bwd_operands`.
"""

import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.cases import OpCase, Sizes, of_op
from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.scaling import BLOCK

_ONE = functools.partial(jnp.ones, ())
# Number of bytes written per value, for each layout of an FP8 operand.
_LAYOUTS = {"rows": 1, "columns": 1, "both": 2}


def elementwise_cases(sizes: Sizes) -> Iterator[OpCase]:
  """Lists the cases without matmuls, except those of MoE layers."""
  yield from _quantize(sizes)
  yield from _blocks(sizes)
  yield from _codes(sizes)
  yield from _norm(sizes)
  yield from _rope(sizes)
  for activation in ("silu", "gelu_tanh"):
    yield from _activation(sizes, activation, gated=True)
  yield from _activation(sizes, "gelu_tanh", gated=False)


def _quantize(sizes):
  shape = dict(zip(("rows", "columns"), sizes.quantized, strict=True))
  size, read = math.prod(sizes.quantized), sizes.value_bytes
  x = lambda: (sizes.normal(*sizes.quantized),)  # noqa: E731
  x_and_scale = lambda: (*x(), _ONE())  # noqa: E731
  for group_size in sizes.group_sizes:
    yield of_op(
      ops.quantize_groups,
      shape | dict(group_size=group_size),
      x,
      lambda op, x, g=group_size: op(x, groups=ops.Groups(g)),
      num_bytes=size * (read + 1 + 2 / group_size),
    )
  yield of_op(
    ops.tensor_scale, shape, x, lambda op, x: op(x), num_bytes=read * size
  )
  # Tests assume that no kernel supports a case with the sizes `ODD`. The kernel
  # of `quantize_rows` supports all widths, but not E5M2, so `ODD` uses E5M2.
  dtype = E5M2 if sizes.quantized[1] % 16 else E4M3
  yield of_op(
    ops.quantize_rows,
    shape,
    x_and_scale,
    lambda op, x, scale: op(x, scale=scale, dtype=dtype),
    num_bytes=size * (read + 1),
  )
  for layout, written in _LAYOUTS.items():
    yield of_op(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="found"),
      x,
      lambda op, x, to=layout: op(x, layout=to),
      num_bytes=size * (2 * read + written),
    )
    yield of_op(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="given"),
      x_and_scale,
      lambda op, x, scale, to=layout: op(x, scale=scale, layout=to),
      num_bytes=size * (read + written),
    )


def _blocks(sizes):
  """Lists cases with a scale per block of 128 values or per 128 x 128 tile."""
  shape = dict(zip(("rows", "columns"), sizes.quantized, strict=True))
  size, read = math.prod(sizes.quantized), sizes.value_bytes
  x = lambda: (sizes.normal(*sizes.quantized),)  # noqa: E731
  rows, columns = sizes.quantized
  blocks = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
  tiles = 4 * math.prod(blocks)
  blocks_of = ops.Blocks()
  yield of_op(
    ops.tensor_scale,
    shape | dict(scaling="tiles"),
    x,
    lambda op, x: op(x, scaling=blocks_of.of_weights),
    implementations=("xla",),
    num_bytes=read * size + tiles,
  )
  # Bytes of the f32 scales, by the layout of the operand.
  of_blocks = dict(rows=4 * rows * blocks[1], columns=4 * columns * blocks[0])
  of_blocks["both"] = sum(of_blocks.values())
  of_tiles = dict(rows=tiles, columns=tiles, both=2 * tiles)
  for name, scaling, scale_bytes in (
    ("blocks", blocks_of, of_blocks),
    ("tiles", blocks_of.of_weights, of_tiles),
  ):
    for layout, written in _LAYOUTS.items():
      yield of_op(
        ops.quantize_tensor,
        shape | dict(scaling=name, layout=layout),
        x,
        lambda op, x, to=layout, by=scaling: op(x, scaling=by, layout=to),
        implementations=("xla",),
        num_bytes=size * (read + written) + scale_bytes[layout],
      )
  yield of_op(
    ops.turn_operand,
    shape,
    lambda: (blocks_of.quantize(*x()),),
    lambda op, x: op(x, scaling=blocks_of),
    num_bytes=2 * size + of_blocks["both"],
  )


def _codes(sizes):
  d, f = sizes.weights["gate_up"]
  yield of_op(
    ops.turn_codes,
    dict(matrices=2, rows=d, columns=f),
    lambda: (sizes.normal(2, d, f).astype(E4M3),),
    lambda op, codes: op(codes),
    num_bytes=4 * d * f,
  )
  yield of_op(
    ops.join_columns,
    dict(devices=2, columns=f, rows=d),
    lambda: (sizes.normal(2, f, d // 2).astype(E4M3),),
    lambda op, parts: op(parts),
    num_bytes=2 * d * f,
  )


def _norm(sizes):
  t, d, kind = sizes.tokens, sizes.d_model, sizes.norm
  shape, size = dict(tokens=t, d_model=d, kind=kind), t * d
  groups = ops.Groups(sizes.group_size)
  has_mean = kind == "layer"

  def x(seed=0):
    # Shift the values, so that a wrong mean or variance has a visible effect.
    return sizes.normal(t, d, seed=seed) + (7 if has_mean else 0)

  def parameters():
    gamma = 1 + sizes.normal(d, seed=5)
    return gamma, sizes.normal(d, seed=6) if has_mean else None

  def normalized():
    mean = 0.1 * jnp.arange(t, dtype=jnp.float32) / t if has_mean else None
    stats = ops.NormStats(mean, 1 + jnp.arange(t, dtype=jnp.float32) / t)
    return sizes.grouped(t, d), *parameters(), stats

  yield of_op(
    ops.norm_input,
    shape,
    lambda: (x(), *parameters()),
    lambda op, *args: op(*args, kind=kind, eps=1e-5, groups=groups),
    num_bytes=size * (sizes.value_bytes + sizes.grouped_bytes),
  )
  for layout, written in _LAYOUTS.items():
    yield of_op(
      ops.norm_fwd,
      shape | dict(layout=layout),
      lambda: (*normalized(), _ONE()),
      lambda op, *args, to=layout: op(*args[:-1], scale=args[-1], layout=to),
      num_bytes=size * (sizes.grouped_bytes + written),
    )
  yield of_op(
    ops.norm_bwd,
    shape | dict(add=True),
    lambda: (sizes.normal(t, d), *normalized(), sizes.normal(t, d, seed=1)),
    lambda op, dy, x, gamma, beta, stats, add: op(
      dy, x, gamma, stats, add=add, dtype=sizes.dtype
    ),
    num_bytes=size * (3 * sizes.value_bytes + sizes.grouped_bytes),
  )


def _rope(sizes):
  b, t, n, h = sizes.heads
  k = sizes.kv_heads
  shape = dict(batch=b, seq=t, num_heads=n, num_kv_heads=k, head_dim=h)
  size, read = b * t * (n + 2 * k) * h, sizes.value_bytes
  cost = 2 * read * size + t * h * 4

  def angles():
    angle = jnp.arange(t * (h // 2), dtype=jnp.float32).reshape(t, h // 2)
    return jnp.cos(angle), jnp.sin(angle)

  def heads():
    q = sizes.normal(b, t, n, h)
    return q, *sizes.normal(2, b, t, k, h, seed=1), *angles()

  yield of_op(
    ops.split_heads,
    shape,
    lambda: (sizes.normal(b, t, (n + 2 * k) * h), *angles()),
    lambda op, *args: op(*args, num_heads=n, num_kv_heads=k),
    num_bytes=cost,
  )
  yield of_op(
    ops.join_heads,
    shape,
    heads,
    lambda op, *args: op(*args),
    num_bytes=cost,
  )
  # Gradients are read twice. Each value is written twice, in rows and in
  # columns, with one byte each. The angles are not counted.
  yield of_op(
    ops.join_heads_operand,
    shape,
    heads,
    lambda op, *args: op(*args),
    num_bytes=size * (2 * read + 1 + 1),
  )
  yield from _still_heads(sizes, shape, heads)


def _still_heads(sizes, shape, heads):
  """Lists cases without RoPE; one case also computes a bias's gradient."""
  b, t, n, h = sizes.heads
  k, read = sizes.kv_heads, sizes.value_bytes
  size, shape = b * t * (n + 2 * k) * h, shape | dict(rotated=False)
  yield of_op(
    ops.split_heads,
    shape,
    lambda: (sizes.normal(b, t, (n + 2 * k) * h),),
    lambda op, qkv: op(qkv, None, None, num_heads=n, num_kv_heads=k),
    num_bytes=2 * read * size,
  )
  yield of_op(
    ops.join_heads,
    shape,
    lambda: heads()[:3],
    lambda op, *args: op(*args, None, None),
    num_bytes=2 * read * size,
  )
  yield of_op(
    ops.join_heads_operand,
    shape | dict(has_sums=True),
    lambda: heads()[:3],
    lambda op, *args: op(*args, None, None, has_sums=True),
    num_bytes=size * (2 * read + 1 + 1),
  )


def _activation(sizes, activation, gated):
  t, f, size = sizes.tokens, sizes.d_ff, sizes.tokens * sizes.d_ff
  shape = dict(tokens=t, d_ff=f, activation=activation, gated=gated)
  how = dict(activation=activation)
  groups, count = ops.Groups(sizes.group_size), 1 + gated
  read, grouped = sizes.value_bytes, count * sizes.grouped_bytes

  def dy_and_parts():
    parts = tuple(sizes.grouped(t, f, seed=i) for i in range(count))
    return sizes.normal(t, f, seed=2), parts

  yield of_op(
    ops.activation_input,
    shape,
    lambda: (sizes.normal(t, count * f),),
    lambda op, x: op(x, groups=groups, gated=gated, **how),
    num_bytes=size * (count * read + grouped),
  )
  yield of_op(
    ops.activation_fwd,
    shape,
    lambda: (dy_and_parts()[1], _ONE()),
    lambda op, parts, scale: op(parts, scale=scale, **how),
    num_bytes=size * (grouped + 1),
  )
  yield of_op(
    ops.activation_bwd,
    shape,
    dy_and_parts,
    lambda op, *args: op(*args, **how),
    num_bytes=size * (read + grouped + count * 4),
  )
  for has_sums in (False,) if gated else (False, True):
    yield of_op(
      ops.activation_bwd_operands,
      shape | (dict(has_sums=True) if has_sums else {}),
      lambda: (*dy_and_parts(), _ONE()),
      lambda op, dy, parts, scale, has_sums=has_sums: op(
        dy, parts, scale=scale, has_sums=has_sums, **how
      ),
      num_bytes=size * (2 * (read + grouped) + count + 1),
    )
