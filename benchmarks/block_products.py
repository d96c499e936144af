# SPDX-License-Identifier: Apache-2.0
"""Measures FP8 matmuls with one scale per block of 128 values, on a GPU.

  python -m benchmarks.block_products [--preset llama2_7b] [--tokens 8192]
    [--matrices gate_up down] [--products linear_wgrad] [--tiles tall low]
    [--implementations cublas mosaic] [--repeats 5]

The command prints a JSON row, `block_products`, for each weight matrix of a
layer, each of its three matmuls (forward, dgrad, wgrad) and each of these
implementations:

  bf16              BF16
  cublas            FP8 with one scale per tensor, computed by cuBLAS
  mosaic, TILE      FP8 with block scales, computed by the Mosaic kernel with a
                    tile of `coat_jax.pallas.mosaic.block_product.TILES`
  xla               FP8 with block scales in plain JAX, only without a GPU

A row contains milliseconds and TFLOP/s. Rows for block scales also contain
`error`, the RMS difference from plain JAX's f32 result, relative to the RMS of
that result. Rounding to BF16 alone causes an error of 0.0017.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks import arguments as args
from benchmarks.cases import Sizes, operand
from benchmarks.harness import measured_rows
from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.ops.linear import in_columns, in_rows
from coat_jax.pallas.mosaic import block_product
from train.presets import PRESETS

# Maps each matmul to (operands, FP8 layouts, contracted axes in BF16, dtype of
# the result). The operands are x [tokens, d], w [d, f], and g [tokens, f], the
# gradient of the output.
PRODUCTS = {
  "linear_fwd": ("xw", (in_rows, in_columns), (1, 0), jnp.bfloat16),
  "linear_dgrad": ("gw", (in_rows, in_rows), (1, 1), jnp.bfloat16),
  "linear_wgrad": ("xg", (in_columns, in_columns), (0, 0), jnp.float32),
}
IMPLEMENTATIONS = "bf16", "cublas", "mosaic", "xla"


def kernels(
  name: str, plain: dict, tensor: dict, block: dict, options
) -> Iterator[tuple[dict, Callable, tuple]]:
  """Yields the labels of each row, the function to time, and its arguments."""
  (a, b), layouts, summed, dtype = PRODUCTS[name]
  op = getattr(ops, name)

  def in_bf16(a, b):
    axes = (((summed[0],), (summed[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)

  def by(implementation):
    return functools.partial(op, dtype=dtype, implementation=implementation)

  yield dict(implementation="bf16"), in_bf16, (plain[a], plain[b])
  yield dict(implementation="cublas"), by("cublas"), (tensor[a], tensor[b])
  blocks = block[a], block[b]
  yield dict(implementation="xla"), by("xla"), blocks
  for tile in options.tiles:

    def by_mosaic(a, b, tile=block_product.TILES[tile]):
      a, b = layouts[0](a), layouts[1](b)
      if not tile.fits(len(a.qvalue), len(b.qvalue)):
        raise NotImplementedError(f"{tile} does not fit {len(a.qvalue)} rows")
      return block_product.product(a, b, dtype, tile=tile)

    yield dict(implementation="mosaic", tile=tile), by_mosaic, blocks


def operands(tokens: int, d: int, f: int) -> tuple[dict, dict, dict]:
  """Samples x, w and g in BF16, and quantizes them per tensor and per block."""
  sizes = Sizes()
  plain = dict(
    x=sizes.normal(tokens, d),
    w=sizes.normal(d, f, seed=1),
    g=sizes.normal(tokens, f, seed=2),
  )

  def blocks(x, scaling):
    return jax.jit(functools.partial(scaling.quantize, layout="both"))(x)

  tensor = dict(
    x=operand(plain["x"]), w=operand(plain["w"]), g=operand(plain["g"], E5M2)
  )
  block = dict(
    x=blocks(plain["x"], ops.Blocks()),
    w=blocks(plain["w"], ops.Blocks().of_weights),
    g=blocks(plain["g"], ops.Blocks()),
  )
  return plain, tensor, block


def rows_of(matrix: str, d: int, f: int, options) -> Iterator[dict]:
  """Measures the matmuls that the options select, for one weight matrix."""
  plain, tensor, block = operands(options.tokens, d, f)
  for name in options.products:
    a, b = PRODUCTS[name][0]
    definition = jax.jit(
      functools.partial(getattr(ops, name).definition, dtype=jnp.float32)
    )
    exact = definition(block[a], block[b])
    case = dict(matrix=matrix, product=name, tokens=options.tokens)
    case |= dict(in_features=d, out_features=f)
    yield from measured_rows(
      "block_products",
      case,
      kernels(name, plain, tensor, block, options),
      block[a],
      exact,
      flops=2 * options.tokens * d * f,
      options=options,
    )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.block_products",
    description=__doc__.splitlines()[0],
  )
  matrices = list(Sizes().weights)
  tiles = list(block_product.TILES)
  parser.add_argument("--preset", choices=PRESETS, default="llama2_7b")
  parser.add_argument("--tokens", type=args.count, default=8192)
  for name, values in (
    ("matrices", matrices),
    ("products", list(PRODUCTS)),
    ("implementations", list(IMPLEMENTATIONS)),
    ("tiles", tiles),
  ):
    parser.add_argument(f"--{name}", nargs="+", choices=values, default=values)
  parser.add_argument("--repeats", type=args.count, default=5)
  options = parser.parse_args(arguments)
  config = PRESETS[options.preset]().model
  sizes = Sizes(
    d_model=config.d_model, d_ff=config.d_ff, num_heads=config.num_heads
  )
  return [
    row
    for matrix in options.matrices
    for row in rows_of(matrix, *sizes.weights[matrix], options)
  ]


if __name__ == "__main__":
  main()
