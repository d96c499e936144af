# SPDX-License-Identifier: Apache-2.0
"""Cases of `benchmarks.ops` that move bytes: all but matrix products.

Counted are the bytes that a case must read and write, matrices only. Where the
largest magnitude of what is written must be known first (`quantize_tensor`
without a scale, `silu_mul_bwd_operands`) what it follows from is read twice.
"""

import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.cases import GROUP_SIZE, Case, Sizes, grouped, normal, of_op
from coat_jax import ops
from coat_jax.formats import E4M3

_GROUPS = dict(group_size=GROUP_SIZE)
# Bytes of a value in FP8 with its share of a BF16 scale; in BF16 it has 2.
_GROUPED = 1 + 2 / GROUP_SIZE
_ONE = functools.partial(jnp.ones, ())
_LAYOUTS = {"rows": 1, "columns": 1, "both": 2}  # Bytes written a value.


def elementwise_cases(sizes: Sizes) -> Iterator[Case]:
  """Every one."""
  yield from _quantize(sizes)
  yield from _join_columns(sizes)
  yield from _norm(sizes)
  yield from _rope(sizes)
  yield from _swiglu(sizes)
  yield from _gelu(sizes)


def _quantize(sizes):
  shape = dict(zip(("rows", "columns"), sizes.quantized, strict=True))
  size = math.prod(sizes.quantized)
  x = lambda: (normal(*sizes.quantized),)  # noqa: E731
  x_and_scale = lambda: (*x(), _ONE())  # noqa: E731
  for group_size in (16, 128):
    yield of_op(
      ops.quantize_groups,
      shape | dict(group_size=group_size),
      x,
      lambda op, x, g=group_size: op(x, group_size=g),
      num_bytes=size * (3 + 2 / group_size),
    )
  yield of_op(
    ops.tensor_scale, shape, x, lambda op, x: op(x), num_bytes=2 * size
  )
  for layout, written in _LAYOUTS.items():
    yield of_op(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="found"),
      x,
      lambda op, x, to=layout: op(x, layout=to),
      num_bytes=size * (4 + written),
    )
    yield of_op(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="given"),
      x_and_scale,
      lambda op, x, scale, to=layout: op(x, scale=scale, layout=to),
      num_bytes=size * (2 + written),
    )


def _join_columns(sizes):
  d, f = sizes.weights["gate_up"]
  yield of_op(
    ops.join_columns,
    dict(devices=2, columns=f, rows=d),
    lambda: (normal(2, f, d // 2).astype(E4M3),),
    lambda op, parts: op(parts),
    num_bytes=2 * d * f,
  )


def _norm(sizes):
  t, d = sizes.tokens, sizes.d_model
  shape, size = dict(tokens=t, d_model=d, kind="rms"), t * d
  gamma = lambda: jnp.ones(d, jnp.bfloat16)  # noqa: E731

  def normalized():
    stats = ops.NormStats(None, jnp.ones(t))
    return grouped(normal(t, d)), gamma(), stats

  yield of_op(
    ops.norm_input,
    shape,
    lambda: (normal(t, d), gamma()),
    lambda op, x, gamma: op(x, gamma, None, kind="rms", eps=1e-5, **_GROUPS),
    num_bytes=size * (2 + _GROUPED),
  )
  for layout, written in _LAYOUTS.items():
    yield of_op(
      ops.norm_fwd,
      shape | dict(layout=layout),
      lambda: (*normalized(), _ONE()),
      lambda op, x, gamma, stats, scale, to=layout: op(
        x, gamma, None, stats, scale=scale, layout=to, **_GROUPS
      ),
      num_bytes=size * (_GROUPED + written),
    )
  yield of_op(
    ops.norm_bwd,
    shape | dict(add=True),
    lambda: (normal(t, d), *normalized(), normal(t, d, seed=1)),
    lambda op, dy, x, gamma, stats, add: op(
      dy, x, gamma, stats, add=add, **_GROUPS
    ),
    num_bytes=size * (2 + _GROUPED + 2 + 2),
  )


def _rope(sizes):
  b, t, n, h = sizes.heads
  shape = dict(batch=b, seq=t, num_heads=n, num_kv_heads=n, head_dim=h)
  cost = 3 * b * t * n * h * (2 + 2) + t * h * 4
  angles = lambda: (jnp.ones((t, h // 2)),) * 2  # noqa: E731
  yield of_op(
    ops.split_heads,
    shape,
    lambda: (normal(b, t, 3 * n * h), *angles()),
    lambda op, *args: op(*args, num_heads=n, num_kv_heads=n),
    num_bytes=cost,
  )
  yield of_op(
    ops.join_heads,
    shape,
    lambda: (*normal(3, b, t, n, h), *angles()),
    lambda op, *args: op(*args),
    num_bytes=cost,
  )
  # Two passes read the gradients, one writes a byte in each layout.
  yield of_op(
    ops.join_heads_operand,
    shape,
    lambda: (*normal(3, b, t, n, h), *angles()),
    lambda op, *args: op(*args),
    num_bytes=3 * b * t * n * h * (2 + 2 + 1 + 1),
  )


def _swiglu(sizes):
  t, f = sizes.tokens, sizes.d_ff
  shape, size = dict(tokens=t, d_ff=f), t * f

  def kept():
    gate, up = normal(2, t, f)
    return grouped(gate), grouped(up), _ONE()

  yield of_op(
    ops.gate_up_input,
    shape,
    lambda: (normal(t, 2 * f),),
    lambda op, gate_up: op(gate_up, **_GROUPS),
    num_bytes=2 * size * (2 + _GROUPED),
  )
  for layout, written in _LAYOUTS.items():
    yield of_op(
      ops.silu_mul_fwd,
      shape | dict(layout=layout),
      kept,
      lambda op, gate, up, scale, to=layout: op(
        gate, up, scale=scale, layout=to, **_GROUPS
      ),
      num_bytes=size * (2 * _GROUPED + written),
    )
  yield of_op(
    ops.silu_mul_bwd_operands,
    shape,
    lambda: (normal(t, f, seed=2), *kept()),
    lambda op, dy, gate, up, scale: op(
      dy, gate, up, product_scale=scale, **_GROUPS
    ),
    num_bytes=size * (2 * (2 + 2 * _GROUPED) + 5),
  )


def _gelu(sizes):
  t, f = sizes.tokens, sizes.d_ff
  shape, size = dict(tokens=t, d_ff=f, approximate=True), t * f
  how = dict(approximate=True, **_GROUPS)
  kept = lambda: (grouped(normal(t, f)), _ONE())  # noqa: E731
  x = lambda: (normal(t, f),)  # noqa: E731
  cost = size * (2 + _GROUPED)
  yield of_op(
    ops.gelu_input, shape, x, lambda op, x: op(x, **how), num_bytes=cost
  )
  yield of_op(
    ops.gelu_fwd,
    shape | dict(layout="rows"),
    kept,
    lambda op, x, scale: op(x, scale=scale, **how),
    num_bytes=size * (_GROUPED + 1),
  )
  yield of_op(
    ops.gelu_bwd_operands,
    shape,
    lambda: (normal(t, f, seed=2), *kept()),
    lambda op, dy, x, scale: op(dy, x, output_scale=scale, **how),
    num_bytes=size * (2 * (2 + _GROUPED) + 3),
  )
