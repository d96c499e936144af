# SPDX-License-Identifier: Apache-2.0
"""How long a step of the optimizer takes, one leaf, everything in place.

  python -m benchmarks.optimizer [--rows 16384] [--codecs coat log8]

optimizer: a row for optax.adamw with donated parameters and state (XLA), and
for each codec, rounding and dtype of parameters and gradients the fused step by
each implementation. Beside the time: `gbps`, the bytes that a step must read
and write (the parameter and the moments both, the gradient once) by that time,
and `ceiling_share`, that by the bandwidth at which this device copies 1 GiB.
Default: 2^28 parameters in a leaf of 16384 x 16384.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import copy_bandwidth, emit, measure, say
from coat_jax import codecs
from coat_jax.optimizer.fused import fused_coat_adamw

CODECS = {
  ("coat", "nearest"): codecs.coat(rounding="nearest"),
  ("coat", "stochastic"): codecs.coat(),
  ("coat_e5m2", "stochastic"): codecs.coat(second="e5m2"),
  ("coat_e8m0", "stochastic"): codecs.coat_e8m0(),
  ("log8", "stochastic"): codecs.log8(),
  ("fp8", "stochastic"): codecs.fp8(),
}
DTYPES = (jnp.float32, jnp.bfloat16)


def parameters(shape, dtype):
  """A parameter and a gradient; its values differ in size as trained ones'."""

  def draw(key):
    keys = jax.random.split(key, 3)
    size = 1e-3 * jnp.exp(jax.random.normal(keys[2], shape))
    g = size * jax.random.normal(keys[1], shape)
    return jax.random.normal(keys[0], shape, dtype), g.astype(dtype)

  return jax.jit(draw)(jax.random.key(0))


def num_bytes(p, g, state) -> int:
  """What a step reads and writes."""
  moments = [x for x in jax.tree.leaves(state) if x.ndim]
  return 2 * p.nbytes + g.nbytes + 2 * sum(x.nbytes for x in moments)


def adamw(shape, dtype, ceiling: float) -> dict:
  """The row of optax.adamw, its moments in the parameter's dtype."""
  p, g = parameters(shape, dtype)
  optimizer = optax.adamw(1e-3, weight_decay=0.1)
  state = jax.jit(optimizer.init)(p)

  def step(p, state, g):
    updates, state = optimizer.update(g, state, p)
    return optax.apply_updates(p, updates), state

  size = num_bytes(p, g, state)
  timing = measure(step, p, state, g, donate=(0, 1))
  case = dict(codec="optax.adamw", dtype=jnp.dtype(dtype).name, shape=shape)
  return report(case, "xla", timing, size, ceiling)


def fused(key, shape, dtype, implementation, ceiling: float) -> dict:
  """The row of `fused_coat_adamw`."""
  p, g = parameters(shape, dtype)
  optimizer = fused_coat_adamw(
    1e-3, codec=CODECS[key], weight_decay=0.1, implementation=implementation
  )
  state = jax.jit(optimizer.init)(p)

  def step(p, state, g):
    return optimizer.apply(g, state, p)

  size = num_bytes(p, g, state)
  timing = measure(step, p, state, g, donate=(0, 1))
  case = dict(codec=key[0], rounding=key[1], dtype=jnp.dtype(dtype).name)
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
    f"{gbps:5.0f} GB/s | {gbps / ceiling:.0%} of copying"
  )
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rows", type=int, default=1 << 14, help="of the leaf")
  parser.add_argument("--columns", type=int, default=1 << 14)
  parser.add_argument("--codecs", nargs="*", help="by name; all if not given")
  args = parser.parse_args()
  shape = args.rows, args.columns
  implementations = ["xla"]
  if jax.default_backend() == "gpu":
    implementations.append("mosaic")
  ceiling = copy_bandwidth()
  for dtype in DTYPES:
    adamw(shape, dtype, ceiling)
  for key in CODECS:
    if args.codecs and key[0] not in args.codecs:
      continue
    for dtype in DTYPES:
      for implementation in implementations:
        fused(key, shape, dtype, implementation, ceiling)


if __name__ == "__main__":
  main()
