# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.ops` measures: operations at the shapes of a layer.

A case knows its arrays, how to call the operation, and what the call costs at
least: the bytes that it must read and write, counted once, or the operations of
its products. An operation that needs the largest magnitude of what it writes
(`quantize_tensor` without a scale, `silu_mul_bwd_operands`) must read twice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E4M3, E5M2
from coat_jax.layers import linear

GROUP_SIZE = 16
_GROUPS = dict(group_size=GROUP_SIZE)
# Bytes of a value in FP8 with its share of a BF16 scale; in BF16 it has 2.
_GROUPED = 1 + 2 / GROUP_SIZE


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


def all_cases(sizes: Sizes) -> list[Case]:
  """Every case."""
  return [
    *_quantize(sizes),
    *_norm(sizes),
    *_residual_add(sizes),
    *_swiglu(sizes),
    *_gelu(sizes),
    *_matmuls(sizes),
    *_linear(sizes),
    *_attention(sizes),
  ]


def _case(op: ops.Op, shape, arrays, call, **cost) -> Case:
  """A case of `call(op with an implementation, *arrays)`."""

  def run(implementation, *args):
    return call(functools.partial(op, implementation=implementation), *args)

  return Case(op.name, shape, run, arrays, op.implementations, **cost)


def _normal(*shape, seed=0, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.jit
def _grouped(x):
  return ops.quantize_groups(x, **_GROUPS, implementation="xla")


@functools.partial(jax.jit, static_argnames="dtype")
def _operand(x, dtype=E4M3):
  how = dict(layout="both", implementation="xla")
  return ops.quantize_tensor(x, dtype=dtype, **how)


_ONE = functools.partial(jnp.ones, ())
_LAYOUTS = {"rows": 1, "columns": 1, "both": 2}  # Bytes written a value.


def _quantize(sizes):
  shape = dict(zip(("rows", "columns"), sizes.quantized, strict=True))
  size = math.prod(sizes.quantized)
  x = lambda: (_normal(*sizes.quantized),)  # noqa: E731
  x_and_scale = lambda: (*x(), _ONE())  # noqa: E731
  for group_size in (16, 128):
    yield _case(
      ops.quantize_groups,
      shape | dict(group_size=group_size),
      x,
      lambda op, x, g=group_size: op(x, group_size=g),
      num_bytes=size * (3 + 2 / group_size),
    )
  yield _case(
    ops.tensor_scale, shape, x, lambda op, x: op(x), num_bytes=2 * size
  )
  for layout, written in _LAYOUTS.items():
    yield _case(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="found"),
      x,
      lambda op, x, to=layout: op(x, layout=to),
      num_bytes=size * (4 + written),
    )
    yield _case(
      ops.quantize_tensor,
      shape | dict(layout=layout, scale="given"),
      x_and_scale,
      lambda op, x, scale, to=layout: op(x, scale=scale, layout=to),
      num_bytes=size * (2 + written),
    )


def _norm(sizes):
  t, d = sizes.tokens, sizes.d_model
  shape, size = dict(tokens=t, d_model=d, kind="rms"), t * d
  gamma = lambda: jnp.ones(d, jnp.bfloat16)  # noqa: E731

  def normalized():
    stats = ops.NormStats(None, jnp.ones(t))
    return _grouped(_normal(t, d)), gamma(), stats

  yield _case(
    ops.norm_input,
    shape,
    lambda: (_normal(t, d), gamma()),
    lambda op, x, gamma: op(x, gamma, None, kind="rms", eps=1e-5, **_GROUPS),
    num_bytes=size * (2 + _GROUPED),
  )
  for layout, written in _LAYOUTS.items():
    yield _case(
      ops.norm_fwd,
      shape | dict(layout=layout),
      lambda: (*normalized(), _ONE()),
      lambda op, x, gamma, stats, scale, to=layout: op(
        x, gamma, None, stats, scale=scale, layout=to, **_GROUPS
      ),
      num_bytes=size * (_GROUPED + written),
    )
  yield _case(
    ops.norm_bwd,
    shape | dict(add=True),
    lambda: (_normal(t, d), *normalized(), _normal(t, d, seed=1)),
    lambda op, dy, x, gamma, stats, add: op(
      dy, x, gamma, stats, add=add, **_GROUPS
    ),
    num_bytes=size * (2 + _GROUPED + 2 + 2),
  )


def _residual_add(sizes):
  t, d = sizes.tokens, sizes.d_model
  shape, size = dict(tokens=t, d_model=d), t * d
  arrays = lambda: tuple(_normal(2, t, d))  # noqa: E731
  yield _case(
    ops.residual_add_fwd,
    shape,
    arrays,
    lambda op, x, y: op(x, y, **_GROUPS),
    num_bytes=size * (2 + 2 + 2 + _GROUPED),
  )
  yield _case(
    ops.residual_add_bwd,
    shape,
    arrays,
    lambda op, g, dx: op(g, dx),
    num_bytes=size * (2 + 2 + 2 + 2 + 2),  # The sum is read for its codes.
  )


def _swiglu(sizes):
  t, f = sizes.tokens, sizes.d_ff
  shape, size = dict(tokens=t, d_ff=f), t * f

  def kept():
    gate, up = _normal(2, t, f)
    return _grouped(gate), _grouped(up), _ONE()

  yield _case(
    ops.gate_up_input,
    shape,
    lambda: (_normal(t, 2 * f),),
    lambda op, gate_up: op(gate_up, **_GROUPS),
    num_bytes=2 * size * (2 + _GROUPED),
  )
  for layout, written in _LAYOUTS.items():
    yield _case(
      ops.silu_mul_fwd,
      shape | dict(layout=layout),
      kept,
      lambda op, gate, up, scale, to=layout: op(
        gate, up, scale=scale, layout=to, **_GROUPS
      ),
      num_bytes=size * (2 * _GROUPED + written),
    )
  yield _case(
    ops.silu_mul_bwd_operands,
    shape,
    lambda: (_normal(t, f, seed=2), *kept()),
    lambda op, dy, gate, up, scale: op(
      dy, gate, up, product_scale=scale, **_GROUPS
    ),
    num_bytes=size * (2 * (2 + 2 * _GROUPED) + 5),
  )


def _gelu(sizes):
  t, f = sizes.tokens, sizes.d_ff
  shape, size = dict(tokens=t, d_ff=f, approximate=True), t * f
  how = dict(approximate=True, **_GROUPS)
  kept = lambda: (_grouped(_normal(t, f)), _ONE())  # noqa: E731
  x = lambda: (_normal(t, f),)  # noqa: E731
  cost = size * (2 + _GROUPED)
  yield _case(
    ops.gelu_input, shape, x, lambda op, x: op(x, **how), num_bytes=cost
  )
  yield _case(
    ops.gelu_fwd,
    shape | dict(layout="rows"),
    kept,
    lambda op, x, scale: op(x, scale=scale, **how),
    num_bytes=size * (_GROUPED + 1),
  )
  yield _case(
    ops.gelu_bwd_operands,
    shape,
    lambda: (_normal(t, f, seed=2), *kept()),
    lambda op, dy, x, scale: op(dy, x, output_scale=scale, **how),
    num_bytes=size * (2 * (2 + _GROUPED) + 3),
  )


def _matmuls(sizes):
  """The products of each linear layer, beside those of BF16 operands."""
  t = sizes.tokens
  # Which two of x [t, d], w [d, f] and g [t, f], and the axes summed over.
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
        _normal(*a),
        _normal(*b, seed=1),
      )
      dtypes = [E5M2 if name == "g" else E4M3 for name in (a, b)]
      operands = lambda plain=plain, dtypes=dtypes: tuple(  # noqa: E731
        map(_operand, plain(), dtypes)
      )
      flops = 2 * t * d * f
      yield _case(
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
  yield _case(
    ops.linear_fwd,
    dict(weight="down", tokens=t, in_features=f, out_features=d, add=True),
    lambda: (_operand(_normal(t, f)), _operand(_normal(f, d)), _normal(t, d)),
    lambda op, x, w, add: op(x, w, add=add),
    flops=2 * t * f * d,
    ceiling="fp8",
  )


def _linear(sizes):
  """Whole linear layers, from BF16 to BF16: ours, in BF16, and Flax's FP8."""
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
      _normal(t, d),
      _normal(d, f, seed=1),
      _normal(t, f, seed=2),
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
  """`flax.linen.Fp8DirectDotGeneralOp` with delayed scales, as one function."""
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
  b, t, n = sizes.batch, sizes.seq, sizes.num_heads
  h = sizes.d_model // n
  shape = dict(batch=b, seq=t, num_heads=n, head_dim=h, causal=True)
  qkv = lambda: tuple(_normal(3, b, t, n, h))  # noqa: E731
  attend = jax.jit(
    functools.partial(ops.attention_fwd, causal=True, implementation="xla")
  )

  def with_residuals():
    dout, *arrays = _normal(4, b, t, n, h)
    return dout, *arrays, attend(*arrays)

  products = 2 * b * n * t * t * h  # Half of two.
  yield _case(
    ops.attention_fwd,
    shape,
    qkv,
    lambda op, q, k, v: op(q, k, v, causal=True),
    flops=products,
    ceiling="bf16",
  )
  yield _case(
    ops.attention_bwd,
    shape,
    with_residuals,
    lambda op, dout, q, k, v, kept: op(dout, q, k, v, kept, causal=True),
    flops=2.5 * products,
    ceiling="bf16",
  )
