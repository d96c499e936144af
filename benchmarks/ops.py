# SPDX-License-Identifier: Apache-2.0
"""Times each implementation of each operation of a layer.

  python -m benchmarks.ops
  python -m benchmarks.ops --cases quantize_groups norm --implementations mosaic
  python -m benchmarks.ops --compare xla --implementations xla mosaic

A row contains the milliseconds per call and a rate: TFLOP/s for matmuls, GB/s
for other operations. FLOPs count matmuls only. Bytes are the fewest bytes that
a call must read and write (`benchmarks.*_cases`).

The command first measures this device's rates for a large FP8 matmul, a large
BF16 matmul, and a copy of 1 GiB. It prints them as the row `ops.ceilings`. The
`ceiling` of an operation is one of these rates, and `share_of_ceiling` is the
operation's rate divided by its ceiling. Without a GPU, kernels are skipped.

With `--compare NAME`, the results of each implementation are compared with the
results of implementation NAME. Each row then contains two lists with one number
per result. `unequal` is the fraction of values whose bits differ; two NaNs
count as equal. `largest_difference` is relative to the largest finite magnitude
in NAME's result.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import arguments as args
from benchmarks.cases import SMOKE, Case, Sizes
from benchmarks.elementwise_cases import elementwise_cases
from benchmarks.harness import (
  copy_bandwidth,
  emit,
  matmul_ceiling,
  measure,
  say,
)
from benchmarks.product_cases import product_cases

# Implementations that run without a GPU.
PORTABLE = ("xla", "bf16", "coat_jax", "flax")


def all_cases(sizes: Sizes) -> list[Case]:
  """Lists the cases of every operation of a layer."""
  return [*elementwise_cases(sizes), *product_cases(sizes)]


def ceilings(*, smoke: bool) -> dict[str, float]:
  """Measures this device's best rates (copy, FP8, BF16); prints a row."""
  sizes = (2**20, 64) if smoke else (2**30, 8192)
  repeats = 2 if smoke else 20
  found = {
    "copy": copy_bandwidth(sizes[0], repeats=repeats),
    **matmul_ceiling(sizes[1], repeats=repeats),
  }
  values = {
    "copy_gbps": found["copy"],
    "fp8_tflops": found["fp8"],
    "bf16_tflops": found["bf16"],
  }
  emit("ops.ceilings", {"bytes": sizes[0], "matmul": sizes[1]}, **values)
  return found


@jax.jit
def _compared(actual: Array, wanted: Array) -> tuple[Array, Array]:
  """Returns the fraction of unequal values, and the largest difference.

  The difference is relative to the largest finite magnitude in `wanted`.
  """
  a, b = (x.astype(jnp.float32) for x in (actual, wanted))
  # In f32, only -0 and 0 compare equal although their bits differ.
  same = (a == b) & (jnp.signbit(a) == jnp.signbit(b))
  same |= jnp.isnan(a) & jnp.isnan(b)
  apart = jnp.where(same, 0, jnp.abs(a - b))
  largest = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0), initial=0)
  return 1 - jnp.mean(same), jnp.max(apart, initial=0) / largest


def compare(case: Case, implementation: str, other: str) -> dict:
  """Compares the results of two implementations of a case."""
  arrays = case.arrays()
  results = [
    jax.jit(functools.partial(case.run, name))(*arrays)
    for name in (implementation, other)
  ]
  compared = [
    _compared(a, b) for a, b in zip(*map(jax.tree.leaves, results), strict=True)
  ]
  unequal, differences = zip(*compared, strict=True)
  return {
    "compared_with": other,
    "unequal": list(map(float, unequal)),
    "largest_difference": list(map(float, differences)),
  }


def run(
  case: Case,
  implementation: str,
  found: dict[str, float],
  *,
  repeats: int,
  other: str | None = None,
) -> dict:
  """Measures an implementation of a case, and prints its row.

  If `other` is given, also compares the results with those of implementation
  `other`. `found` is the result of `ceilings`.
  """
  fn = functools.partial(case.run, implementation)
  timing = measure(fn, *case.arrays(), repeats=repeats)
  if case.flops:
    rate, values = timing.tflops(case.flops), {"flops": case.flops}
    values["tflops"] = rate
  else:
    rate, values = timing.gbps(case.num_bytes), {"bytes": case.num_bytes}
    values["gbps"] = rate
  return emit(
    "ops",
    {"op": case.op, **case.shape},
    implementation=implementation,
    **timing.row,
    **values,
    ceiling=case.ceiling,
    share_of_ceiling=rate / found[case.ceiling],
    **({} if other is None else compare(case, implementation, other)),
  )


def chosen(options: argparse.Namespace) -> list[tuple[Case, str]]:
  """Lists the chosen (case, implementation) pairs that can run here."""
  on_gpu = jax.default_backend() == "gpu"
  return [
    (case, name)
    for case in all_cases(SMOKE if options.smoke else Sizes())
    if not options.cases or any(text in case.op for text in options.cases)
    for name in case.implementations
    if on_gpu or name in PORTABLE
    if not options.implementations or name in options.implementations
  ]


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows of operations."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.ops",
    description="Times each implementation of each operation of a layer.",
  )
  parser.add_argument(
    "--cases",
    nargs="+",
    help="measure only operations whose names contain one of these strings",
  )
  parser.add_argument(
    "--implementations",
    nargs="+",
    help="names such as xla, mosaic, cublas; default: all",
  )
  parser.add_argument(
    "--compare",
    metavar="IMPLEMENTATION",
    help="also compare results with the results of this implementation",
  )
  parser.add_argument(
    "--smoke", action="store_true", help="use tiny shapes for a quick test"
  )
  parser.add_argument("--repeats", type=args.count, default=20)
  options = parser.parse_args(arguments)
  pairs = chosen(options)
  if not pairs:
    parser.error(
      "--cases and --implementations must select a case that runs here, got "
      f"{options.cases or 'all'} and {options.implementations or 'all'}; pass "
      "other names"
    )
  found, rows = ceilings(smoke=options.smoke), []
  for case, implementation in pairs:
    try:
      row = run(
        case,
        implementation,
        found,
        repeats=options.repeats,
        other=options.compare,
      )
    except NotImplementedError as reason:
      say(f"skipped: {reason}")
    else:
      rows.append(row)
  return rows


if __name__ == "__main__":
  main()
