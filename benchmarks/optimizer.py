# SPDX-License-Identifier: Apache-2.0
"""Times an optimizer's in-place step on one large leaf.

  python -m benchmarks.optimizer [--rows 16384] [--columns 16384]
    [--codecs coat log8] [--weights float32 bfloat16 bfloat16_low8]
    [--optimizer coat_lion] [--implementations mosaic]

The command prints JSON rows, `optimizer`: for optax.adamw (or optax.lion), a
row per weight dtype; for the fused step, a row per combination of codec,
rounding, weight format and implementation. --codecs also accepts your own codec
as package.module:function.

By default, the leaf is an array of 16384 x 16384 = 2^28 weights. Gradients have
the weights' dtype. With the format bfloat16_low8, weights are BF16, and the
state stores 8 more bits of each weight (`low_bits`).

A row contains the time per step. `gbps` is the number of bytes that a step must
read and write, divided by this time: the weights and the state count twice, the
gradient once. `ceiling_share` is `gbps` divided by the rate at which this
device reads and writes 1 GiB.
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from benchmarks import arguments as args
from benchmarks.harness import copy_bandwidth, emit, measure, say
from coat_jax import codecs
from coat_jax.optimizer.fused import fused_coat_adamw, fused_coat_lion

# For each optimizer: the fused version, and optax's version.
OPTIMIZERS: dict[str, tuple[Callable, Callable]] = {
  "coat_adamw": (fused_coat_adamw, optax.adamw),
  "coat_lion": (fused_coat_lion, optax.lion),
}
# For each weight format: the dtype of weights and gradients, and whether the
# state stores 8 more bits of each weight.
WEIGHTS = {
  "float32": (jnp.float32, False),
  "bfloat16": (jnp.bfloat16, False),
  "bfloat16_low8": (jnp.bfloat16, True),
}


def cases(
  names: Sequence[str] | None = None,
) -> dict[tuple[str, str], codecs.MomentCodec]:
  """Builds all variants of the named codecs, or of all codecs.

  The keys of the result are (label, rounding).
  """
  found = {}
  for name in codecs.names() if names is None else names:
    defaults = codecs.options(name)
    for options in codecs.variants(name):
      codec = codecs.build(name, **options)
      other = [
        str(value)
        for key, value in options.items()
        if key != "rounding" and value != defaults[key]
      ]
      label = "_".join([codec.name, *other])
      found[label, options.get("rounding", "nearest")] = codec
  return found


def parameters(shape, dtype):
  """Samples weights, and gradients whose magnitudes vary as in training."""

  def draw(key):
    keys = jax.random.split(key, 3)
    size = 1e-3 * jnp.exp(jax.random.normal(keys[2], shape))
    g = size * jax.random.normal(keys[1], shape)
    return jax.random.normal(keys[0], shape, dtype), g.astype(dtype)

  return jax.jit(draw)(jax.random.key(0))


def num_bytes(p, g, state) -> int:
  """Counts the bytes that a step reads and writes."""
  arrays = [x for x in jax.tree.leaves(state) if x.ndim]
  return 2 * p.nbytes + g.nbytes + 2 * sum(x.nbytes for x in arrays)


def plain(name: str, shape, dtype, ceiling: float) -> dict:
  """Times optax's optimizer, with moments in `dtype`; prints a row."""
  p, g = parameters(shape, dtype)
  make = OPTIMIZERS[name][1]
  optimizer = make(1e-3, weight_decay=0.1)
  state = jax.jit(optimizer.init)(p)

  def step(p, state, g):
    updates, state = optimizer.update(g, state, p)
    return optax.apply_updates(p, updates), state

  size = num_bytes(p, g, state)
  timing = measure(step, p, state, g, donate=(0, 1))
  case = dict(
    codec=f"optax.{make.__name__}", dtype=jnp.dtype(dtype).name, shape=shape
  )
  return report(case, "xla", timing, size, ceiling)


def has_kernel(name: str, codec, shape, dtype) -> bool:
  """Returns whether Mosaic has a kernel for the fused step."""
  said = OPTIMIZERS[name][0](1e-3, codec=codec).explain(
    {"p": jax.ShapeDtypeStruct(shape, dtype)}
  )
  return "mosaic on a GPU" in said["p"]


def implementations(name: str, codec, shape, dtype) -> list[str]:
  """Lists the implementations that can run the fused step here."""
  on_gpu = jax.default_backend() == "gpu"
  if on_gpu and has_kernel(name, codec, shape, dtype):
    return ["xla", "mosaic"]
  return ["xla"]


def fused(
  name: str,
  key,
  codec,
  shape,
  kind: str,
  implementation: str,
  ceiling: float,
) -> dict:
  """Times `fused_coat_adamw` or `fused_coat_lion`; prints a row."""
  dtype, low_bits = WEIGHTS[kind]
  p, g = parameters(shape, dtype)
  optimizer = OPTIMIZERS[name][0](
    1e-3,
    codec=codec,
    weight_decay=0.1,
    low_bits=low_bits,
    implementation=implementation,
  )
  state = jax.jit(optimizer.init)(p)

  def step(p, state, g):
    return optimizer.apply(g, state, p)

  size = num_bytes(p, g, state)
  timing = measure(step, p, state, g, donate=(0, 1))
  case = dict(codec=key[0], rounding=key[1], dtype=kind)
  case |= {} if name == "coat_adamw" else dict(optimizer=name)
  return report(case | dict(shape=shape), implementation, timing, size, ceiling)


def report(case, implementation, timing, size: int, ceiling: float) -> dict:
  gbps = timing.gbps(size)
  row = emit(
    "optimizer",
    case,
    implementation=implementation,
    **timing.row,
    gbps=gbps,
    ceiling_share=gbps / ceiling,
  )
  name = " ".join(str(v) for k, v in case.items() if k != "shape")
  say(
    f"{name:32s} {implementation:7s} {timing.median_ms * 1e3:7.0f} us | "
    f"{gbps:5.0f} GB/s | {gbps / ceiling:.0%} of a copy"
  )
  return row


@args.command
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--rows", type=args.count, default=1 << 14, help="rows of the leaf"
  )
  parser.add_argument("--columns", type=args.count, default=1 << 14)
  parser.add_argument(
    "--codecs", nargs="+", help="names of codecs; default: all codecs"
  )
  parser.add_argument(
    "--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS)
  )
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="coat_adamw")
  parser.add_argument(
    "--implementations",
    nargs="+",
    choices=("xla", "mosaic"),
    default=("xla", "mosaic"),
    help="implementations to time, if they can run here; default: both",
  )
  options = parser.parse_args(arguments)
  name = options.optimizer
  shape = options.rows, options.columns
  with args.checked(parser):
    chosen = cases(options.codecs)
  ceiling = copy_bandwidth()
  for dtype in dict.fromkeys(WEIGHTS[kind][0] for kind in options.weights):
    plain(name, shape, dtype, ceiling)
  for key, codec in chosen.items():
    for kind in options.weights:
      dtype = WEIGHTS[kind][0]
      for implementation in implementations(name, codec, shape, dtype):
        if implementation not in options.implementations:
          continue
        fused(name, key, codec, shape, kind, implementation, ceiling)


if __name__ == "__main__":
  main()
