# SPDX-License-Identifier: Apache-2.0
"""Lists the cases of `benchmarks.ops` for matmuls and for MoE layers.

BF16 and Flax's FP8 are timed for comparison. FLOPs count matmuls only. For
attention, they count only the (query, key) pairs that the mask allows.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from benchmarks.cases import Case, Sizes, of_op, operand
from coat_jax import ops, recipes
from coat_jax.layers import linear
from coat_jax.numerics.formats import E4M3, E5M2


def product_cases(sizes: Sizes) -> Iterator[Case]:
  """Lists the cases for matmuls and for MoE layers."""
  yield from _matmuls(sizes)
  yield from _grouped(sizes)
  yield from _linear(sizes)
  yield from _attention(sizes)


def _matmuls(sizes):
  """Lists the matmuls of each linear layer, in FP8 and in BF16."""
  t = sizes.tokens
  # For each op: its two operands, and the contracted axis of each. Operands are
  # x [tokens, d], w [d, f] and the output's gradient g [tokens, f].
  products = (
    (ops.linear_fwd, "x", "w", (1, 0)),
    (ops.linear_dgrad, "g", "w", (1, 1)),
    (ops.linear_wgrad, "x", "g", (0, 0)),
  )
  for weight, (d, f) in sizes.weights.items():
    shapes = {"x": (t, d), "w": (d, f), "g": (t, f)}
    shape = dict(weight=weight, tokens=t, in_features=d, out_features=f)
    for op, a, b, summed in products:
      plain = lambda a=shapes[a], b=shapes[b]: (  # noqa: E731
        sizes.normal(*a),
        sizes.normal(*b, seed=1),
      )
      dtypes = [E5M2 if name == "g" else E4M3 for name in (a, b)]
      operands = lambda plain=plain, dtypes=dtypes: tuple(  # noqa: E731
        map(operand, plain(), dtypes)
      )
      flops = 2 * t * d * f
      yield of_op(
        op,
        shape,
        operands,
        lambda op, a, b: op(a, b, dtype=jnp.bfloat16),
        flops=flops,
        ceiling="fp8",
      )
      axes = (((summed[0],), (summed[1],)), ((), ()))
      run = lambda _, a, b, axes=axes: jax.lax.dot_general(a, b, axes)  # noqa: E731
      yield Case(
        op.name, shape, run, plain, ("bf16",), flops=flops, ceiling="bf16"
      )
  d, f = sizes.d_model, sizes.d_ff
  yield of_op(
    ops.linear_fwd,
    dict(weight="down", tokens=t, in_features=f, out_features=d, add=True),
    lambda: (
      operand(sizes.normal(t, f)),
      operand(sizes.normal(f, d)),
      sizes.normal(t, d),
    ),
    lambda op, x, w, add: op(x, w, add=add, dtype=sizes.dtype),
    flops=2 * t * f * d,
    ceiling="fp8",
  )
  yield of_op(
    ops.linear_fwd,
    dict(weight="up", tokens=t, in_features=d, out_features=f, bias=True),
    lambda: (
      operand(sizes.normal(t, d)),
      operand(sizes.normal(d, f)),
      sizes.normal(f),
    ),
    lambda op, x, w, bias: op(x, w, bias=bias, dtype=sizes.dtype),
    flops=2 * t * f * d,
    ceiling="fp8",
  )


def _grouped(sizes):
  """Lists an MoE layer's matmuls, `take_rows` and `quantize_experts`."""
  t, d, f = sizes.tokens, sizes.d_model, sizes.d_ff
  e = sizes.num_experts
  shapes = {"x": (t, d), "w": (e, d, f), "g": (t, f)}
  shape = dict(experts=e, rows=t, in_features=d, out_features=f)
  # Expert i gets a number of rows proportional to i, so expert 0 gets none.
  ends = [t * i * (i + 1) // (e * (e - 1)) for i in range(e)]
  counts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
  for op, a, b in (
    (ops.grouped_fwd, "x", "w"),
    (ops.grouped_dgrad, "g", "w"),
    (ops.grouped_wgrad, "x", "g"),
  ):
    yield of_op(
      op,
      shape,
      lambda a=a, b=b: (
        sizes.normal(*shapes[a]),
        sizes.normal(*shapes[b], seed=1),
        jnp.array(counts, jnp.int32),
      ),
      lambda op, a, b, counts: op(a, b, counts, dtype=sizes.dtype),
      flops=2 * t * d * f,
      ceiling="bf16",
    )
  rows, weights = sizes.normal, lambda: sizes.normal(e, d, f)
  sizes_of = lambda: jnp.array(counts, jnp.int32)  # noqa: E731
  values = {
    "x": lambda: _rows_in_fp8(rows(t, d), sizes_of(), E4M3),
    "w": lambda: _experts_in_fp8(weights()),
    "g": lambda: _rows_in_fp8(rows(t, f, seed=1), sizes_of(), E5M2),
  }
  for op, a, b in (
    (ops.grouped_linear_fwd, "x", "w"),
    (ops.grouped_linear_dgrad, "g", "w"),
    (ops.grouped_linear_wgrad, "x", "g"),
  ):
    yield of_op(
      op,
      shape,
      lambda a=a, b=b: (values[a](), values[b](), sizes_of()),
      lambda op, a, b, counts: op(a, b, counts, dtype=sizes.dtype),
      flops=2 * t * d * f,
      ceiling="fp8",
    )
  yield of_op(
    ops.take_rows,
    dict(tokens=t, rows=4 * t, columns=d),
    lambda: (
      sizes.normal(t, d),
      jax.random.randint(jax.random.key(0), (4 * t,), 0, t),
    ),
    lambda op, x, index: op(x, index),
    num_bytes=5 * t * d * sizes.value_bytes,
  )
  # Tests need a case that the kernel does not support, so odd sizes use E5M2.
  scaling = ops.PerTensor(E5M2 if f % 16 else E4M3)
  yield of_op(
    ops.quantize_experts,
    dict(experts=e, rows=d, columns=f, scale="found"),
    lambda: (weights(),),
    lambda op, w: op(w, scaling=scaling, layout="both"),
    num_bytes=e * d * f * (2 * sizes.value_bytes + 2),
  )


@functools.partial(jax.jit, static_argnums=2)
def _rows_in_fp8(x, sizes, dtype):
  scaling = ops.PerTensor(dtype)
  is_used = jnp.arange(len(x)) < jnp.sum(sizes)
  x = jnp.where(is_used[:, None], x, jnp.zeros((), x.dtype))
  return ops.quantize_tensor(x, scaling=scaling, layout="both")


_experts_in_fp8 = jax.jit(
  functools.partial(ops.quantize_experts, layout="both")
)


def _linear(sizes):
  """Lists whole linear layers: in BF16, in our FP8 and in Flax's FP8."""
  t = sizes.tokens
  layers = {
    "bf16": lambda x, w: linear(x, w, recipe=recipes.bf16()),
    "coat_jax": lambda x, w: linear(x, w, recipe=recipes.fp8_linear()),
    "flax": _flax_linear,
  }

  def full(name, x, w, g):
    y, backward = jax.vjp(layers[name], x, w)
    return y, *backward(g)

  for weight, (d, f) in sizes.weights.items():
    shape = dict(weight=weight, tokens=t, in_features=d, out_features=f)
    arrays = lambda d=d, f=f: (  # noqa: E731
      sizes.normal(t, d),
      sizes.normal(d, f, seed=1),
      sizes.normal(t, f, seed=2),
    )
    for name in layers:
      yield Case(
        "linear",
        shape | dict(mode="full"),
        full,
        arrays,
        (name,),
        flops=6 * t * d * f,
        ceiling="bf16" if name == "bf16" else "fp8",
      )


def _flax_linear(x, w):
  """Computes x @ w like Flax's `Fp8DirectDotGeneralOp` (delayed scaling)."""
  ones, history = jnp.ones(1), jnp.zeros(1024)
  return fp8_ops.fp8_scaled_dot_general(
    x,
    w,
    (((1,), (0,)), ((), ())),
    preferred_element_type=x.dtype,
    lhs_scale=ones,
    rhs_scale=ones,
    grad_scale=ones,
    lhs_amax_history=history,
    rhs_amax_history=history,
    grad_amax_history=history,
    quantize_compute_type=x.dtype,
  )


def _attention(sizes):
  window = -(-sizes.seq // 2)
  yield from _attention_of(sizes, ops.AttentionKind())
  yield from _attention_of(sizes, ops.AttentionKind(window=window))
  yield from _attention_of(sizes, ops.AttentionKind(soft_cap=50.0))
  capped = ops.AttentionKind(window=window, soft_cap=50.0)
  yield from _attention_of(sizes, capped)
  yield from _attention_of(sizes, ops.AttentionKind(), documents=4)


def _attention_of(sizes, kind, documents=None):
  """Lists the cases of `kind`, with `documents` documents in each sequence."""
  b, t, n, h = sizes.heads
  shape = dict(batch=b, seq=t, num_heads=n, head_dim=h, causal=True)
  if kind.window is not None:
    shape |= dict(window=kind.window)
  if kind.soft_cap is not None:
    shape |= dict(soft_cap=kind.soft_cap)
  if documents is not None:
    shape |= dict(documents=documents)
  # cuDNN supports neither soft caps nor documents.
  others = kind.soft_cap is not None or documents is not None
  implementations = ("xla", "mosaic") if others else None

  def segments():
    if documents is None:
      return None
    ids = jnp.arange(t, dtype=jnp.int32) * documents // t
    return jnp.broadcast_to(ids, (b, t))

  def qkv():
    k_and_v = sizes.normal(2, b, t, sizes.kv_heads, h, seed=1)
    return sizes.normal(b, t, n, h), *k_and_v, segments()

  attend = jax.jit(
    functools.partial(ops.attention_fwd, kind=kind, implementation="xla")
  )

  def with_residuals():
    dout, arrays = sizes.normal(b, t, n, h, seed=2), qkv()
    *heads, ids = arrays
    return dout, *heads, attend(*arrays), ids

  # Attention does two multiply-adds per channel for each (query, key) pair that
  # the mask allows. A sequence of T tokens has T^2 / 2 such pairs. A window W
  # leaves (T^2 - (T - W)^2) / 2 pairs, and D documents leave T^2 / (2 * D).
  hidden = t - (kind.window or t)
  products = 2 * b * n * (t * t - hidden * hidden) * h // (documents or 1)
  yield of_op(
    ops.attention_fwd,
    shape,
    qkv,
    lambda op, *args: op(*args, kind=kind),
    implementations,
    flops=products,
    ceiling="bf16",
  )
  yield of_op(
    ops.attention_bwd,
    shape,
    with_residuals,
    lambda op, *args: op(*args, kind=kind),
    implementations,
    flops=2.5 * products,
    ceiling="bf16",
  )
