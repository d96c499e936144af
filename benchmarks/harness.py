# SPDX-License-Identifier: Apache-2.0
"""Times functions, and prints the rows of benchmarks.

A row is a JSON object on one line of standard output. Its keys are bench, case
(what was measured), the measured values, date (UTC), jax (the version) and
device. Progress is printed to standard error.

`measure` times groups of calls. A GPU runs one call while Python dispatches the
next call, so a group is timed from the dispatch of its first call to the end of
its last call. Dispatching a short call may take longer than running it. So if
calls on a GPU take less than half a millisecond, the profiler times their
kernels instead. Small arguments would stay in the L2 cache, so consecutive
calls get different copies of them.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.numerics.formats import E4M3

# The copies of arguments and results together have at least this size, unless
# that would take more than `_MOST_CALLS` copies. An H200's L2 cache has 50 MiB.
_CACHE_BYTES = 2 * 60 * 2**20
# A group takes this long, but has at most `_MOST_CALLS` calls. In a long group,
# the GPU's clock settles, and the first dispatch and final wait are negligible.
_GROUP_SECONDS = 0.1
_MOST_CALLS = 24
_WARM_UP_CALLS = 3
# Calls on a GPU that take less time than this are timed with the profiler.
_SHORTEST_SECONDS = 5e-4
_PROFILED_CALLS = 10
_GROUP_NAME = "measured group "


@dataclasses.dataclass(frozen=True)
class Timing:
  """Milliseconds per call: the median and percentiles over groups of calls."""

  median_ms: float
  p20_ms: float
  p80_ms: float

  @property
  def row(self) -> dict[str, float]:
    """The keys and values for a row."""
    return dataclasses.asdict(self)

  def gbps(self, num_bytes: float) -> float:
    """Returns GB/s, given the number of bytes that a call reads and writes."""
    return num_bytes / self.median_ms * 1e-6

  def tflops(self, flops: float) -> float:
    """Returns TFLOP/s, given a call's number of floating-point operations."""
    return flops / self.median_ms * 1e-9


def measure(
  fn: Callable,
  *args,
  donate: tuple[int, ...] = (),
  repeats: int = 20,
) -> Timing:
  """Compiles `fn`, warms up with a few calls, and times `repeats` groups.

  `donate` lists the positions of arguments that a call may overwrite. `fn` must
  return a tuple that starts with the new values of these arguments, which are
  passed to a later call.
  """
  calls = _Calls(fn, args, donate)
  _group(calls, _WARM_UP_CALLS)
  once = _group(calls, _PROFILED_CALLS) / _PROFILED_CALLS
  if jax.default_backend() == "gpu" and once < _SHORTEST_SECONDS:
    times = _kernel_seconds(calls, _PROFILED_CALLS, repeats)
  else:
    count = min(math.ceil(_GROUP_SECONDS / once), _MOST_CALLS)
    times = [_group(calls, count) / count for _ in range(repeats)]
  p20, median, p80 = np.percentile(times, [20, 50, 80]) * 1e3
  return Timing(float(median), float(p20), float(p80))


def copy_bandwidth(num_bytes: int = 2**30, *, repeats: int = 20) -> float:
  """Measures the bandwidth, in GB/s, of reading and writing a large array."""
  x = jax.random.normal(jax.random.key(0), num_bytes // 4)
  # Negate the array, because a GPU has a separate engine for plain copies.
  return measure(jnp.negative, x, repeats=repeats).gbps(2 * x.nbytes)


def matmul_ceiling(size: int = 8192, *, repeats: int = 20) -> dict[str, float]:
  """Measures the TFLOP/s of large square matmuls.

  Returns the rates of "bf16" and of "fp8" (E4M3 with XLA's fast accumulation).
  """
  algorithm = None
  if jax.default_backend() == "gpu":
    algorithm = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM

  def fp8(a, b):
    return jax.lax.dot_general(
      a, b, (((1,), (1,)), ((), ())), algorithm, jnp.bfloat16
    )

  # With zeros, the GPU would need less power and run at a higher clock.
  a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
  found = {}
  for name, fn, dtype in (("fp8", fp8, E4M3), ("bf16", jnp.matmul, a.dtype)):
    timing = measure(fn, a.astype(dtype), b.astype(dtype), repeats=repeats)
    found[name] = timing.tflops(2 * size**3)
  return found


def device_name() -> str:
  """Returns the first device's name, and for a CPU the number of cores."""
  kind = jax.devices()[0].device_kind
  if jax.default_backend() == "cpu":
    return f"{kind} {platform.machine()}, {os.cpu_count()} cores"
  return kind


def emit(bench: str, case: dict, **values) -> dict:
  """Prints one row and returns it; rounds floats to 6 significant digits."""
  row = {
    "bench": bench,
    "case": case,
    **_rounded(values),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "jax": jax.__version__,
    "device": device_name(),
  }
  print(json.dumps(row, allow_nan=False), flush=True)
  return row


def say(text: str) -> None:
  """Prints to standard error; standard output is only for rows."""
  print(text, file=sys.stderr, flush=True)


def _rounded(values):
  if isinstance(values, dict):
    return {key: _rounded(value) for key, value in values.items()}
  if isinstance(values, float):
    return float(f"{values:.6g}")
  return values


class _Calls:
  """Calls a jitted function with several copies of its arguments in turn."""

  def __init__(self, fn, args, donate):
    self.jitted = jax.jit(fn, donate_argnums=donate)
    self.donate = donate
    results = jax.eval_shape(fn, *args)
    if donate:
      self._check(results, args)
    # Keep each result until the same copy of the arguments is used again.
    # Otherwise, the next call could write to the result's memory, which is
    # still in the cache.
    size = _num_bytes(args) + _num_bytes(results)
    turns = min(math.ceil(_CACHE_BYTES / max(size, 1)), _MOST_CALLS)
    copies = [jax.tree.map(jnp.copy, args) for _ in range(turns - 1)]
    self.args = [args, *copies]
    self.results = [None] * turns
    self.turn = 0

  def __call__(self):
    turn = self.turn
    result = self.jitted(*self.args[turn])
    if self.donate:
      args = list(self.args[turn])
      for i, new in zip(self.donate, result, strict=False):
        args[i] = new
      self.args[turn] = tuple(args)
    self.results[turn] = result
    self.turn = (turn + 1) % len(self.args)
    return result

  def _check(self, results, args):
    first = results[: len(self.donate)] if isinstance(results, tuple) else None
    expected = tuple(args[i] for i in self.donate)
    if _shapes(first) != _shapes(expected):
      raise ValueError(
        "measure: fn must return a tuple that starts with the new values of "
        f"the donated arguments {self.donate}, shaped {_shapes(expected)}, got "
        f"{_shapes(results)}; return the new values first"
      )


def _shapes(tree):
  leaves, structure = jax.tree.flatten(tree)
  return structure, [f"{x.dtype}{list(x.shape)}" for x in leaves]


def _num_bytes(tree) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves)


def _group(calls: _Calls, count: int) -> float:
  """Returns the seconds that `count` calls take, including dispatch."""
  start = time.perf_counter()
  for _ in range(count - 1):
    calls()
  jax.block_until_ready(calls())
  return time.perf_counter() - start


def _kernel_seconds(calls: _Calls, count: int, repeats: int) -> list[float]:
  """Returns each group's kernel time per call, in seconds."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for i in range(repeats):
        with jax.profiler.TraceAnnotation(f"{_GROUP_NAME}{i}"):
          _group(calls, count)
        # The clocks of GPU and CPU differ by less than this pause, so kernels
        # can be assigned to groups by their start times.
        time.sleep(1e-3)
    (path,) = Path(folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
  groups, kernels = {}, []
  for plane in data.planes:
    for line in plane.lines:
      if "GPU" in plane.name and "Stream" in line.name:
        kernels += [(e.start_ns, e.duration_ns) for e in line.events]
      elif "GPU" not in plane.name:
        groups |= {
          e.name: (e.start_ns, e.start_ns + e.duration_ns)
          for e in line.events
          if e.name.startswith(_GROUP_NAME)
        }
  assert len(groups) == repeats, groups
  return [
    sum(took for start, took in kernels if first <= start <= last)
    / count
    * 1e-9
    for first, last in groups.values()
  ]


def error_of(actual, expected) -> float:
  """Computes the RMS difference, relative to the RMS of `expected`."""
  norm = jax.jit(lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype("float32")))))
  return float(norm(actual.astype("float32") - expected) / norm(expected))


def measured_rows(
  bench: str, case: dict, candidates, reference, exact, *, flops: int, options
) -> Iterator[dict]:
  """Measures the chosen implementations of a matmul that this device can run.

  Prints and yields a row for each. `candidates` yields a row's labels, the
  function to time, and its arguments. If `exact` is given and the function's
  first argument is `reference`, the row contains the error of the result
  relative to `exact`.
  """
  on_gpu = jax.default_backend() == "gpu"
  for labels, fn, arrays in candidates:
    implementation = labels["implementation"]
    if implementation not in options.implementations:
      continue
    if on_gpu == (implementation == "xla") and implementation != "bf16":
      continue
    try:
      timing = measure(fn, *arrays, repeats=options.repeats)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as reason:
      say(f"skipped {implementation}: {str(reason).splitlines()[0]}")
      continue
    found = timing.row | dict(tflops=timing.tflops(flops))
    if arrays[0] is reference and exact is not None:
      found["error"] = error_of(jax.jit(fn)(*arrays), exact)
    words = [x for x in (case | labels).values() if isinstance(x, str)]
    error = f"  error {found['error']:.2g}" if "error" in found else ""
    say(
      f"{' '.join(words):40s} {found['tflops']:7.1f} TFLOP/s  "
      f"{found['median_ms']:.4f} ms{error}"
    )
    yield emit(bench, case, **labels, **found)
