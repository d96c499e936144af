# SPDX-License-Identifier: Apache-2.0
"""The row that every benchmark prints, and what describes where it ran.

A row is one JSON object a line on the standard output, so that a file of them
can be filtered and compared; what people read meanwhile goes to the standard
error. Its keys: bench, case (what was measured), the measured values, and date
(UTC), jax, device.
"""

import datetime
import json
import os
import platform
import sys

import jax


def device_name() -> str:
  """The first device's kind, with the number of cores where it is a CPU."""
  kind = jax.devices()[0].device_kind
  if jax.default_backend() == "cpu":
    return f"{kind} {platform.machine()}, {os.cpu_count()} cores"
  return kind


def emit(bench: str, case: dict, **values) -> dict:
  """Prints one row and returns it.

  Args:
    bench: Which figure, as "accuracy.codecs".
    case: What was measured, by name.
    **values: What was found; floats are kept to six digits, NaN and infinity
      are refused since JSON has none.

  Returns:
    The row, as it was printed.

  Raises:
    ValueError: a value that is not finite.
  """
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
  """Tells the person who waits; rows alone are on the standard output."""
  print(text, file=sys.stderr, flush=True)


def _rounded(values):
  if isinstance(values, dict):
    return {key: _rounded(value) for key, value in values.items()}
  if isinstance(values, float):
    return float(f"{values:.6g}")
  return values
