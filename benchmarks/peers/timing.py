# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch calls on a GPU and prints rows as `benchmarks.harness` does.

This file imports torch but not jax, so that only torch allocates GPU memory.
"""

import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable

import torch

_GROUP_SECONDS = 0.1
_MOST_CALLS = 24
_WARM_UP_CALLS = 10


def measure(fn: Callable[[], object], repeats: int = 20) -> dict[str, float]:
  """Times groups of calls; returns percentiles of the milliseconds per call.

  `fn` must return without waiting for the GPU.
  """
  _group(fn, _WARM_UP_CALLS)
  once = _group(fn, _WARM_UP_CALLS) / _WARM_UP_CALLS
  count = min(math.ceil(1e3 * _GROUP_SECONDS / once), _MOST_CALLS)
  times = [_group(fn, count) / count for _ in range(repeats)]
  fifths = statistics.quantiles(times, n=5, method="inclusive")
  return dict(
    median_ms=statistics.median(times), p20_ms=fifths[0], p80_ms=fifths[3]
  )


def _group(fn: Callable[[], object], count: int) -> float:
  """Returns the milliseconds that `count` calls take on the GPU."""
  begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
  begin.record()
  for _ in range(count):
    fn()
  end.record()
  torch.cuda.synchronize()
  return begin.elapsed_time(end)


def emit(bench: str, case: dict, implementation: str, **values) -> dict:
  """Prints one row and returns it; floats are rounded to six digits."""
  rounded = {
    key: float(f"{value:.6g}") if isinstance(value, float) else value
    for key, value in values.items()
  }
  row = {
    "bench": bench,
    "case": case,
    "implementation": implementation,
    **rounded,
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "torch": torch.__version__,
    "device": torch.cuda.get_device_name(),
  }
  print(json.dumps(row, allow_nan=False), flush=True)
  return row


def attempt(name: str, run: Callable[[], object]) -> bool:
  """Calls `run`; if it fails, prints the reason and returns False."""
  print(name, file=sys.stderr, flush=True)
  try:
    run()
  except Exception as error:
    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return False
  finally:
    torch.cuda.empty_cache()
  return True
