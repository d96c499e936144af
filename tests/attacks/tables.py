# SPDX-License-Identifier: Apache-2.0
"""Lists the wrong command lines that `tests.attacks.calls` runs.

They combine flags with bad values, or name bad files. Each has only one fault;
without it the command line would be accepted.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.train.runs import arguments

RUN = "run"  # Folder of a finished run, which no call may change.
_LONG = "9" * 400

# Bad values for each kind of option.
_COUNT = ("0", "-1", "1.5", "1e20", "9" * 20, "9" * 5000, "inf", "nan", "", "x")
_POSITIVE = ("0", "-1", "inf", "-inf", "nan", "1e400", _LONG, "", "x")
_SHARE = ("-0.1", "1.5", "inf", "nan", "1e400", "", "x")
_CHOICE = ("", "x", "COAT", "0")
_USER = "~nosuchuser/x"


def _pretrain() -> Iterator[list[str]]:
  """Yields arguments of train.pretrain; some name the folder of a run."""
  counts = (
    *("steps", "batch", "accumulate", "seq", "compare-seeds", "eval-every"),
    *("eval-batches", "save-every", "keep", "activation-group-size"),
    *("model.num-layers", "model.d-model", "model.d-ff", "model.num-heads"),
    *("model.num-kv-heads", "model.vocab-size", "optim.group-size"),
  )
  positive = (
    *("optim.lr", "optim.eps", "optim.grad-clip", "model.rope-theta"),
    *("model.norm-eps", "model.clip-qkv"),
  )
  shares = (*("optim.b1", "optim.b2", "optim.min-lr-ratio", "data.held-out"),)
  choices = (
    *("recipe", "residuals", "attention", "weight-cache", "evaluation"),
    *("compute", "remat", "implementation", "grad-reduce", "compare"),
    *("optim.codec", "optim.rounding", "optim.second", "optim.schedule"),
    *("data.dtype", "model.family"),
  )
  table = [
    *((name, _COUNT) for name in counts),
    *((name, _POSITIVE) for name in positive),
    *((name, _SHARE) for name in shares),
    *((name, _CHOICE) for name in choices),
    ("seed", ("-1", "1.5", "1e20", "9" * 20, "nan", "")),
    ("optim.warmup", ("-1", "inf", "nan", "1e20", _LONG, "3")),
    ("optim.weight-decay", ("-1", "inf", "nan", "1e400", "")),
    ("optim.b1", ("1", "0.99999999999")),
    ("optim.eps", ("1e-300", "2")),
    ("model.vocab-size", ("100", "17000000")),
    ("model.d-model", ("65", "2000000")),
    ("optim.codec", ("caot", "no.such:codec", "os:getcwd", "os.path:", ":x")),
    ("mesh", _MESHES),
    ("profile", ("0", "-1", "5:", ":5", "3", "9" * 30, "x", "inf")),
    ("data.path", (*_PATHS, "empty", "short", "binary", "zeros/*")),
    ("data.tokenizer", (*_PATHS, "empty", "short", "binary", "brackets")),
    ("tensorboard", ("x",)),
    ("no-such-option", ("1",)),
  ]
  how = itertools.cycle((["--overwrite"], ["--resume"], []))
  for name, values in table:
    for value in values:
      yield _with(RUN, *next(how), f"--{name}", value)
  for out in ("", " ", _USER, "empty", "zeros", "/dev/null", "/proc/x", "."):
    yield _with(out)
    yield _with(out, "--overwrite")
  for extra in (
    ["--resume", "--overwrite"],
    ["--convert-state"],
    ["--params", "bfloat8"],
    ["--optimizer-in-backward"],
    ["--optimizer-in-backward", "--optim.clip", "global"],
    ["--optim.clip", "adagc"],
    ["--grad-accumulate", "bfloat16"],
    ["--distributed"],
    ["--grad-reduce", "bfloat16"],
    ["--recipe", "bf16", "--residuals", "coat"],
    ["--recipe", "bf16", "--optim.codec", "float32", "--compare", "bf16"],
    ["--optim.codec", "log8", "--optim.rounding", "nearest"],
    ["--optim.codec", "float32", "--optim.group-size", "64"],
    ["--resume", "--optim.codec", "log8"],
    ["--resume", "--seed", "7"],
    ["--resume", "--batch", "4"],
    ["--resume", "--data.path", "text"],
    ["--data.dtype", "uint16"],
    ["--data.path", "ids", "--data.dtype", "uint16"],
    ["--data.path", "binary", "--data.dtype", "uint32"],
    ["--data.path", "text", "--data.dtype", "uint16", "--data.tokenizer", "x"],
    ["--data.path", "text", "--seq", "100000"],
    ["--data.path", "text", "--batch", "100000"],
    ["--mesh", "fsdp=2", "--batch", "3"],
    ["--profile", "2:1"],
    [],
  ):
    yield _with(RUN, *extra)
  yield []
  yield ["dmeo"]
  yield ["demo", "llama_60m"]


_PATHS = ("", " ", _USER, "missing", "no*thing", "x" * 300, "/dev/zero")
_MESHES = (
  *("fsdp", "fsdp=", "fsdp=0", "fsdp=-1", "fsdp=2.0", "fsdp=" + _LONG, "x=2"),
  *("fsdp=2,fsdp=2", "fsdp=2;data=2", "tensor=3", "fsdp=1000", ",", "fsdp=٣"),
)


def _with(out: str, *extra: str) -> list[str]:
  """Returns the tiny run's command line, with more arguments."""
  return [*arguments(out, steps=2, save_every=1, eval_batches=1), *extra]


def _plan() -> Iterator[list[str]]:
  yield []
  yield ["dmeo"]
  for name, values in (
    ("batch", _COUNT),
    ("seq", _COUNT),
    ("accumulate", _COUNT),
    ("gpus", _COUNT),
    ("group-size", _COUNT),
    ("remat", _CHOICE),
    ("params", _CHOICE),
    ("attention", _CHOICE),
    ("trained", (*_CHOICE, "all")),
    ("images-each", (*_COUNT, "2")),
    ("init-from", ("missing", "empty", "zeros", RUN, _USER)),
    ("codec", ("", "x", "no.such:codec")),
    ("mesh", _MESHES),
    (
      "hbm",
      ("", "80MB", "0GB", "-1GB", "infGB", "nanGB", _LONG + "GB", "1e9GB", "GB")
      + ("1.2.3GB", "80 GB", "9999999999GB"),
    ),
  ):
    for value in values:
      yield ["demo", f"--{name}", value]


def _plot() -> Iterator[list[str]]:
  yield []
  for path in ("missing", "empty", "zeros", _USER, "/dev/null"):
    yield [path]
    yield [RUN, path]
  for out in (
    *("zeros", ".", "", "figure", "figure.txt", "figure.", "missing/a.png"),
    *("empty/a.png", _USER + ".png", "/dev/null/a.png", "/proc/a.png"),
  ):
    yield [RUN, "--out", out]
  yield [RUN, "--outt", "a.png"]


def _convert() -> Iterator[list[str]]:
  yield []
  yield ["export"]
  yield ["import"]
  yield ["exprot", RUN, "out"]
  for path in ("missing", "empty", "zeros", _USER, ""):
    yield ["export", path, "out"]
    yield ["import", path, "demo", "--config.out", "made"]
  for out in (RUN, "zeros", "empty", _USER):
    yield ["export", RUN, out]
  yield ["import", RUN, "demo", "--out", "made"]
  yield ["import", "missing", "demo", "--out", RUN]
  yield ["import", "missing", "demo", "--out", ""]
  yield ["import", "missing", "demo", "--out", _USER]
  yield ["import", "missing", "demo", "--out", "made", "--steps", "inf"]


def _generate() -> Iterator[list[str]]:
  prompt = ["--prompt", "x", "--max-tokens", "8"]
  yield []
  yield [RUN]
  yield [RUN, "--prompt", ""]
  yield [RUN, "--prompt", "x" * 10_000]
  yield [RUN, *prompt, "--chat"]
  for path in ("missing", "empty", "zeros", _USER, "", "/dev/null"):
    yield [path, *prompt]
  for name, values in {
    "max-tokens": _COUNT,
    "temperature": ("-1", "inf", "nan", "1e400", _LONG, "", "x"),
    "top-k": _COUNT,
    "top-p": (*_POSITIVE, "1.5"),
    "seed": ("-1", "1.5", "1e20", "9" * 20, "nan", ""),
    "tokenizer": (*_PATHS, "empty", "short", "binary", "brackets"),
    "no-such-option": ("1",),
  }.items():
    for value in values:
      yield [RUN, *prompt, f"--{name}", value]


def _benchmarks() -> Iterator[tuple[str, list[str]]]:
  """Yields calls of benchmarks and studies."""
  few = ("0", "-1", "1.5", "9" * 20, "inf", "", "x")
  codecs = ("", "x", "no.such:codec", "os:getcwd")
  figures = ("zeros", "figure", "figure.txt", "empty/a.png", "/proc/a.png")
  for program, table in {
    "studies.accuracy": {"steps": few, "codecs": codecs, "out": figures},
    "benchmarks.layer": {
      **dict.fromkeys(("batch", "seq", "repeats"), few),
      **dict.fromkeys(("preset", "variants", "param-dtype"), _CHOICE),
    },
    "benchmarks.ops": {
      "repeats": few,
      "cases": ("x",),
      "implementations": ("x",),
    },
    "benchmarks.optimizer": {"rows": few, "columns": few, "codecs": codecs},
    "benchmarks.training": {
      **dict.fromkeys(("batch", "seq", "steps"), few),
      **dict.fromkeys(("preset", "variant", "grad-reduce"), _CHOICE),
      "weight-cache": _CHOICE,
      "hbm": ("80", "0", "-1", "inf", "nan", "1e400", "", "x"),
      "mesh": _MESHES,
    },
  }.items():
    first = ["codecs"] if program == "studies.accuracy" else []
    for name, values in table.items():
      for value in values:
        yield program, [*first, f"--{name}", value]
  yield "studies.accuracy", []
  yield "benchmarks.training", ["--in-process"]
  yield "benchmarks.layer", ["--compile-only", "--preset", "demo"]
  for line in (
    [],
    ["x"],
    ["residuals", "--tokens", "0"],
    ["residuals", "--tokens", "9" * 20],
    ["state", "--preset", "x"],
    ["plan", "--variants", "x"],
    ["plan", "--presets", "demo", "--gpus", "1"],
    ["plan", "--gpus", "3"],
  ):
    yield "benchmarks.memory", line
  for line in (["--gpus", "3"], ["--gpus", "1", "--presets", "llama2_7b"]):
    yield "studies.table7", line


def bad_calls() -> Iterator[tuple[str, list[str], bool]]:
  """Yields a program, its arguments, and whether it runs in a new process."""
  found = [
    *(("train.pretrain", x) for x in _pretrain()),
    *(("train.plan", x) for x in _plan()),
    *(("train.plot", x) for x in _plot()),
    *(("train.convert", x) for x in _convert()),
    *(("train.generate", x) for x in _generate()),
    *_benchmarks(),
  ]
  yield from ((*each, False) for each in found)
  # Call each program once in a new process, as a person would.
  seen = set()
  for program, line in reversed(found):
    if program not in seen:
      seen.add(program)
      yield program, line, True


def make_files() -> None:
  """Makes the files that calls name, in the working directory."""
  files = {
    "empty": b"",
    "short": b"too short a text",
    "text": b"Words enough to be trained on, though not many. " * 200,
    "binary": b"\0\1\2\3\4" * 999,
    "brackets": b"[" * 300_000,
    "ids": np.full(40_000, 300, np.uint16).tobytes(),
    "zeros/a": bytes(9999),
  }
  for name, content in files.items():
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
