# SPDX-License-Identifier: Apache-2.0
"""Measures the expert matmuls of MoE layers in FP8 and BF16, on a GPU.

  python -m benchmarks.grouped_products
    [--models qwen3_30b_a3b mixtral_8x7b] [--tokens 8192]
    [--matrices gate_up down] [--routings uniform skewed]
    [--products fwd dgrad wgrad] [--implementations bf16 mosaic_bf16 mosaic]
    [--tiles two three] [--repeats 5]

The command prints a JSON row, `grouped_products`, for each combination of
model, weight matrix, routing, matmul and implementation. Implementations:

  bf16              BF16, computed by XLA's `ragged_dot`
  mosaic            FP8, computed by the Mosaic kernel
  mosaic_bf16       BF16, computed by the same kernel
  xla               FP8 in plain JAX, only without a GPU

The Mosaic kernel runs fwd and dgrad with each `tile` (a key of
`coat_jax.pallas.mosaic.grouped_product.TILES`), and wgrad with each `dtype` of
the weights' gradient (f32 and BF16). Other implementations compute this
gradient in f32.

A row contains milliseconds and TFLOP/s. Rows for FP8 also contain `error`, the
RMS difference from plain JAX's f32 result, relative to the RMS of that result.
Rounding to BF16 alone causes an error of 0.0017. If plain JAX runs out of
memory, `error` is missing.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arguments as args
from benchmarks.cases import Sizes
from benchmarks.harness import measured_rows, say
from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.pallas.mosaic import grouped_product
from coat_jax.pallas.mosaic.grouped_product import TILES


class Shape(NamedTuple):
  """The sizes of an MoE layer."""

  d_model: int
  d_ff: int
  num_experts: int
  experts_per_token: int

  def matrix(self, name: str) -> tuple[int, int]:
    """Returns how many inputs and outputs an expert's weight matrix has."""
    if name == "gate_up":
      return self.d_model, 2 * self.d_ff
    return self.d_ff, self.d_model


MODELS = {
  "qwen3_30b_a3b": Shape(2048, 768, 128, 8),
  "mixtral_8x7b": Shape(4096, 14336, 8, 2),
  "demo_moe": Shape(128, 192, 8, 2),
}
# The two operands of each matmul. Operands are x [rows, d], w [experts, d, f],
# and g [rows, f], the gradient of the output.
PRODUCTS = {"fwd": "xw", "dgrad": "gw", "wgrad": "xg"}
MATRICES = "gate_up", "down"
ROUTINGS = "uniform", "skewed"
IMPLEMENTATIONS = "bf16", "mosaic_bf16", "mosaic", "xla"


def sizes_of(routing: str, rows: int, experts: int) -> np.ndarray:
  """Samples how many of the input's rows each expert gets, with a fixed seed.

  With "skewed" routing, experts are ranked at random. The expert of rank r gets
  a row with a probability proportional to 1 / r; the last expert gets no rows.
  """
  share = np.ones(experts)
  if routing == "skewed":
    share = 1 / np.arange(1, experts + 1)
    share[-1] = 0
  rng = np.random.default_rng(0)
  return rng.multinomial(rows, rng.permutation(share / share.sum()))


def arrays(rows: int, d: int, f: int, sizes) -> tuple[dict, dict]:
  """Samples the operands of `PRODUCTS` in BF16, and quantizes them to FP8."""
  make = Sizes().normal
  plain = dict(x=make(rows, d), g=make(rows, f, seed=1))
  plain["w"] = make(len(sizes), d, f, seed=2)

  @jax.jit
  def quantized(x, w, g):
    rows = functools.partial(ops.quantize_tensor, layout="both")
    gradients = ops.PerTensor(E5M2)
    return dict(
      x=rows(x),
      g=rows(g, scaling=gradients),
      w=ops.quantize_experts(w, layout="both"),
    )

  return plain, quantized(**plain)


def kernels(
  name: str, plain: dict, codes: dict, sizes, tiles
) -> Iterator[tuple[dict, Callable, tuple]]:
  """Yields the labels of each row, the function to time, and its arguments."""
  dtype = jnp.float32 if name == "wgrad" else jnp.bfloat16
  in_bf16, in_fp8 = getattr(ops, f"grouped_{name}"), op_of(name)
  a, b = PRODUCTS[name]
  for implementation, op, source in (
    ("bf16", in_bf16.definition, plain),
    ("xla", in_fp8.definition, codes),
  ):
    fn = functools.partial(op, dtype=dtype)
    yield dict(implementation=implementation), fn, (source[a], source[b], sizes)
  of_weights = name == "wgrad"
  if of_weights:
    product = grouped_product.weights_product
    settings = [
      (dict(dtype=each), dict(dtype=each)) for each in ("float32", "bfloat16")
    ]
  else:
    product = functools.partial(grouped_product.rows_product, dtype=dtype)
    settings = [
      (dict(tile=tile), dict(how=grouped_product.How(TILES[tile])))
      for tile in tiles
    ]
  for labels, options in settings:
    run = functools.partial(product, **options)

    def of_codes(a, b, sizes, run=run):
      scale = jnp.broadcast_to(a.scale * b.scale, sizes.shape)
      if of_weights:
        return run(a.columns, b.columns, sizes, scale=scale)
      weights = b.columns if name == "fwd" else b.rows
      return run(a.rows, weights, sizes, scale=scale)

    of_values = functools.partial(run, k_first=True) if name == "fwd" else run
    for implementation, fn, source in (
      ("mosaic", of_codes, codes),
      ("mosaic_bf16", of_values, plain),
    ):
      what = dict(implementation=implementation, **labels)
      yield what, fn, (source[a], source[b], sizes)


def op_of(name: str) -> Any:
  """Returns the operation on FP8 operands for "fwd", "dgrad" or "wgrad"."""
  return getattr(ops, f"grouped_linear_{name}")


def rows_of(model: str, matrix: str, routing: str, options) -> Iterator[dict]:
  """Measures the matmuls that the options select, for one weight matrix."""
  shape = MODELS[model]
  d, f = shape.matrix(matrix)
  rows = options.tokens * shape.experts_per_token
  counts = sizes_of(routing, rows, shape.num_experts)
  sizes = jnp.asarray(counts, jnp.int32)
  plain, codes = arrays(rows, d, f, sizes)
  for name in options.products:
    a, b = (codes[of] for of in PRODUCTS[name])
    try:
      definition = functools.partial(op_of(name).definition, dtype=jnp.float32)
      exact = jax.block_until_ready(jax.jit(definition)(a, b, sizes))
    except jax.errors.JaxRuntimeError as reason:
      say(f"no exact result to compare with: {str(reason).splitlines()[0]}")
      exact = None
    case = dict(model=model, matrix=matrix, routing=routing, product=name)
    case |= dict(rows=rows, in_features=d, out_features=f)
    case |= dict(experts=len(counts), largest=int(counts.max()))
    yield from measured_rows(
      "grouped_products",
      case,
      kernels(name, plain, codes, sizes, options.tiles),
      a,
      exact,
      flops=2 * rows * d * f,
      options=options,
    )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.grouped_products",
    description=__doc__.splitlines()[0],
  )
  parser.add_argument("--tokens", type=args.count, default=8192)
  for name, values, default in (
    ("models", list(MODELS), list(MODELS)[:2]),
    ("matrices", list(MATRICES), None),
    ("routings", list(ROUTINGS), None),
    ("products", list(PRODUCTS), None),
    ("implementations", list(IMPLEMENTATIONS), None),
    ("tiles", list(TILES), None),
  ):
    parser.add_argument(
      f"--{name}", nargs="+", choices=values, default=default or values
    )
  parser.add_argument("--repeats", type=args.count, default=5)
  options = parser.parse_args(arguments)
  return [
    row
    for model in options.models
    for matrix in options.matrices
    for routing in options.routings
    for row in rows_of(model, matrix, routing, options)
  ]


if __name__ == "__main__":
  main()
