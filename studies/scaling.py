# SPDX-License-Identifier: Apache-2.0
"""Compares FP8 with one scale per tensor to FP8 with one per block of 128.

  python -m studies.scaling [--preset llama_60m] [--batch 1] [--seq 512]
    [--outliers 1 30] [--compile-only] [--repeats 20]

The study measures error, memory and time of one decoder layer of a preset, with
random parameters. The layer's input x and the gradient dy of its output y are
sampled from a normal distribution. Block scales are meant for outliers. To
create outliers, --outliers K multiplies every 64th feature and every 128th
token of x and dy by K, so a value at both is multiplied by K^2.

scaling.layer: one row for each kind of scales and each K. Errors are relative
RMS differences from BF16.

  output_error     error of y - x
  dx_error         error of dx - dy
  dweights_error   error of the gradients of all weight matrices together
  bytes_per_token  bytes that the layer saves for its backward pass
  forward_ms       milliseconds of the forward pass
  full_ms          milliseconds of the forward and backward pass
  temporary_bytes  temporary memory of the forward and backward pass

Errors are measured for every K, bytes and times only for the first K. Times and
`temporary_bytes` require a GPU.

scaling.product, only on a GPU: one row per weight matrix, kind of scales and
matmul (forward, dx and dw), with milliseconds and TFLOP/s. The times do not
include quantizing the operands. If no kernel supports a matmul with block
scales, it runs in plain JAX.

With --compile-only, the layer is only compiled, for an H200 (`make test-aot`
installs the compiler). The rows, `scaling.compiled`, contain temporary bytes
and the numbers of matmuls that cuBLASLt and Mosaic run.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import aot
from benchmarks import arguments as args
from benchmarks.cases import Sizes
from benchmarks.harness import emit, measure, say
from benchmarks.layer import (
  Layer,
  Variant,
  make_arrays,
  make_specs,
  with_gradients,
)
from benchmarks.layer import temporary_bytes as temporary_bytes_of
from coat_jax import ops, recipes
from coat_jax.numerics.formats import E4M3
from coat_jax.recipes import CoatRecipe, Formats
from train.memory.count import residual_bytes
from train.presets import PRESETS

_E4M3 = Formats(gradients=E4M3)
VARIANTS: dict[str, CoatRecipe] = {
  "tensor, E5M2 gradients": recipes.coat(),
  "tensor, E4M3 gradients": dataclasses.replace(recipes.coat(), formats=_E4M3),
  "block, E5M2 gradients": dataclasses.replace(
    recipes.fp8_block(), formats=Formats()
  ),
  "block, E4M3 gradients": recipes.fp8_block(),
}


def arrays_of(config, options, outliers: int):
  """Creates random parameters, and random x and dy with outliers."""
  layer = Layer(config, Variant(recipes.bf16()))
  shape = options.batch, options.seq, config.d_model
  params, x, dy = make_arrays(layer, config, shape, jnp.float32)
  features = jnp.where(jnp.arange(shape[2]) % 64 == 7, outliers, 1)
  tokens = jnp.where(jnp.arange(shape[1]) % 128 == 5, outliers, 1)
  size = (tokens[:, None] * features[None])[None].astype(x.dtype)
  return params, x * size, dy * size


def errors(config, recipe: CoatRecipe, arrays, exact) -> dict[str, float]:
  """Computes relative RMS differences of a recipe's results from `exact`."""
  found = results(config, recipe, arrays)

  def relative(name: str) -> float:
    pairs = list(zip(found[name], exact[name], strict=True))
    error = sum(np.sum((a - e) ** 2) for a, e in pairs)
    return float(np.sqrt(error / sum(np.sum(e**2) for _, e in pairs)))

  return {f"{name}_error": relative(name) for name in found}


def results(config, recipe: CoatRecipe, arrays) -> dict[str, list]:
  """Computes a layer's y - x, dx - dy and the gradients of its matrices."""
  layer = Layer(config, Variant(recipe))

  @jax.jit
  def run(params, x, dy):
    y, dparams, dx = with_gradients(layer.forward)(params, x, dy)
    f32 = jnp.float32
    matrices = [w for w in jax.tree.leaves(dparams) if w.ndim > 1]
    return y.astype(f32) - x.astype(f32), dx.astype(f32) - dy, matrices

  y, dx, dweights = jax.tree.map(np.asarray, run(*arrays))
  return dict(output=[y], dx=[dx], dweights=dweights)


def cost(config, recipe: CoatRecipe, arrays, options) -> dict[str, float]:
  """Returns saved bytes, and on a GPU milliseconds and temporary bytes."""
  plain = dataclasses.replace(recipe, implementation="xla")
  tokens = min(options.seq, 256)
  saved = residual_bytes(config, plain, tokens=tokens)["total"]
  values: dict[str, float] = dict(bytes_per_token=saved)
  if jax.default_backend() != "gpu":
    return values
  layer = Layer(config, Variant(recipe))
  full = with_gradients(layer.forward)
  values["temporary_bytes"] = temporary_bytes_of(
    full, jax.eval_shape(lambda: arrays), target=None
  )
  for mode, fn, count in (("forward", layer.forward, 2), ("full", full, 3)):
    timing = measure(fn, *arrays[:count], repeats=options.repeats)
    values[f"{mode}_ms"] = timing.median_ms
  return values


def products(config, options, case) -> list[dict]:
  """Times each matrix's matmuls with one scale per tensor and per block."""
  sizes = Sizes(
    batch=options.batch,
    seq=options.seq,
    d_model=config.d_model,
    d_ff=config.d_ff,
    num_heads=config.num_heads,
  )
  scalings = {"tensor": ops.PerTensor(), "block": ops.Blocks()}
  found = []
  for matrix, (d, f) in sizes.weights.items():
    x, g = sizes.normal(sizes.tokens, d), sizes.normal(sizes.tokens, f, seed=1)
    w = sizes.normal(d, f, seed=2)
    for scales, scaling in scalings.items():
      both = functools.partial(
        ops.quantize_tensor, scaling=scaling, layout="both"
      )
      xs, gs = jax.jit(both)(x), jax.jit(both)(g)
      ws = jax.jit(functools.partial(both, scaling=scaling.of_weights))(w)
      for op, a, b, dtype in (
        (ops.linear_fwd, xs, ws, jnp.bfloat16),
        (ops.linear_dgrad, gs, ws, jnp.bfloat16),
        (ops.linear_wgrad, xs, gs, jnp.float32),
      ):
        timing = measure(
          lambda a, b, op=op, dtype=dtype: op(a, b, dtype=dtype),
          a,
          b,
          repeats=options.repeats,
        )
        tflops = timing.tflops(2 * sizes.tokens * d * f)
        where = case | dict(scales=scales, matrix=matrix, product=op.name)
        row = emit("scaling.product", where, **timing.row, tflops=tflops)
        found.append(row)
  return found


def compiled(config, recipe: CoatRecipe, options) -> dict:
  """Compiles a layer for an H200; returns temporary bytes and matmul counts."""
  layer = Layer(config, Variant(recipe))
  shape = options.batch, options.seq, config.d_model
  program = aot.compile_for_h200(
    with_gradients(layer.forward), *make_specs(layer, shape, jnp.bfloat16)
  )
  text = program.as_text()
  return dict(
    temporary_bytes=aot.temporary_bytes(program),
    cublas_products=text.count('custom_call_target="__cublas$lt$matmul$f8"'),
    mosaic_products=text.count('custom_call_target="mosaic_gpu_v2"'),
  )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.scaling", description=__doc__.splitlines()[0]
  )
  parser.add_argument("--preset", choices=PRESETS, default="llama_60m")
  parser.add_argument("--batch", type=args.count, default=1)
  parser.add_argument("--seq", type=args.count, default=512)
  parser.add_argument("--outliers", type=args.count, nargs="+", default=[1, 30])
  parser.add_argument("--compile-only", action="store_true")
  parser.add_argument("--repeats", type=args.count, default=20)
  options = parser.parse_args(arguments)
  if options.compile_only:
    aot.only_compile()
  config = PRESETS[options.preset]().model
  case = dict(preset=options.preset, batch=options.batch, seq=options.seq)
  rows = []
  if options.compile_only:
    for name, recipe in VARIANTS.items():
      say(f"{options.preset}: {name}, compiled for an H200")
      where = case | dict(scales=name, compiled_for="NVIDIA H200")
      values = compiled(config, recipe, options)
      rows.append(emit("scaling.compiled", where, **values))
    return rows
  if jax.default_backend() == "gpu":
    rows += products(config, options, case)
  for outliers in options.outliers:
    arrays = arrays_of(config, options, outliers)
    exact = results(config, recipes.bf16(), arrays)
    for name, recipe in VARIANTS.items():
      say(f"{options.preset}: {name}, outliers x{outliers}")
      values = errors(config, recipe, arrays, exact)
      if outliers == options.outliers[0]:
        values |= cost(config, recipe, arrays, options)
      where = case | dict(scales=name, outliers=outliers)
      rows.append(emit("scaling.layer", where, **values))
  return rows


if __name__ == "__main__":
  main()
