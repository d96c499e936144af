# SPDX-License-Identifier: Apache-2.0
"""Compares codecs of optimizer moments: bytes, errors and training losses.

  python -m studies.codec_race errors [--steps 300]
  python -m studies.codec_race losses [--steps 200] [--minutes 30]
  python -m studies.codec_race losses --preset llama_60m --steps 1500 \\
    --batch 32 --data tokens.bin --data-dtype uint16
  python -m studies.codec_race table

A candidate is an optimizer and a way to store its moments; see
`studies.race_candidates`. The baseline of a candidate is its optimizer with f32
moments. By default, all candidates with f32 weights run. To run another one,
pass its name, such as "BF16 weights, stochastic", to --candidates.

codec_race.errors, for candidates with AdamW: a model is trained with f32
moments, which are then encoded and decoded once. The row contains the relative
RMS errors of m, of sqrt(v), and of the update m / (sqrt(v) + eps).

codec_race.losses: a model with the `bf16` recipe is trained with each
candidate. The seed determines weights, data and rounding, so runs with the same
seed start from the same weights and read the same batches. `loss` is the mean
over the last 50 steps, and `held_out_loss` is the mean over the held-out
batches. All candidates run with one seed before any of them runs with the next
seed. Runs that have a row in --rows are skipped, so you can interrupt the
command and continue later. With --minutes, the command stops before a run that
would probably exceed this limit.

In rows of `errors`, the bytes per parameter count only the stored moments of
large leaves. In rows of `losses`, they count the optimizer's whole state.

`table` prints all rows of a preset as a table. For baselines, it shows losses.
For other candidates, it shows the differences from the baseline's losses with
the same seeds. If there are three seeds or more, the table contains only the
mean of the differences and its 95 % confidence interval.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax import recipes
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from coat_jax.numerics import stochastic
from coat_jax.numerics.formats import array_bytes
from coat_jax.optimizer import default_quantize_mask, state_bytes
from coat_jax.optimizer.masks import leaf_paths
from studies.codec_race_table import BENCH, ROWS, table
from studies.quantization_error import relative_error
from studies.race_candidates import CANDIDATES, Candidate, transformation
from studies.rows import read_rows
from studies.stability_run import CHUNK, Data
from studies.trained_moments import EPS, MODEL, Trained, train_model
from train.config import TrainConfig
from train.data.tokens import DTYPES, DataConfig, load_tokens
from train.presets import PRESETS

SEEDS = (0, 1, 2)
_LAST = 50


class Programs:
  """The compiled functions of a candidate, which all seeds share."""

  def __init__(self, candidate: Candidate, config: TrainConfig):
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32

    def split(seed):
      rngs = nnx.Rngs(jax.random.key(seed))
      model = Decoder(config.model, recipes.bf16(), dtype=dtype, rngs=rngs)
      return nnx.split(model, nnx.Param)

    graph = nnx.eval_shape(lambda: split(0)[0])

    def initial(seed):
      params = nnx.to_pure_dict(split(seed)[1])
      return params, transformation(candidate, config, seed).init(params)

    def loss(params, tokens):
      return loss_fn(nnx.merge(graph, params), tokens)

    def train(carry, rows, seed):
      optimizer = transformation(candidate, config, seed)

      def one(carry, tokens):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

      return jax.lax.scan(one, carry, rows)

    self.initial, self.evaluate = jax.jit(initial), jax.jit(loss)
    self.train = jax.jit(train, donate_argnums=0)

  def run(self, data: Data, seed: int) -> dict[str, Any]:
    """Trains with a seed; returns the values of a row."""
    started, number = time.monotonic(), jnp.uint32(seed)
    params, state = self.initial(number)
    size = state_bytes(state, params).bytes_per_param
    tokens, losses = data.train(seed), []
    for first in range(0, len(tokens), CHUNK):
      rows = jnp.asarray(tokens[first : first + CHUNK])
      (params, state), found = self.train((params, state), rows, number)
      losses += np.asarray(found, float).tolist()
    held_out = [float(self.evaluate(params, x)) for x in data.held_out]
    values = {
      "loss": float(np.mean(losses[-_LAST:])),
      "held_out_loss": float(np.mean(held_out)),
    }
    # JSON has no NaN, so the losses of a diverged run are null.
    values = {k: x if np.isfinite(x) else None for k, x in values.items()}
    seconds = round(time.monotonic() - started, 1)
    return values | dict(bytes_per_param=size, seconds=seconds)


def race(
  config: TrainConfig,
  data: Data,
  todo: Iterable[dict[str, Any]],
  rows: Path,
  minutes: float,
) -> None:
  """Trains the cases in `todo`, and appends a row to `rows` for each."""
  started, longest = time.monotonic(), 0.0
  programs: dict[str, Programs] = {}
  for case in todo:
    began = time.monotonic()
    if began - started + 1.1 * longest > 60 * minutes:
      say(f"{minutes:g} minutes are over; run the command again to continue")
      return
    name = case["candidate"]
    if name not in programs:
      programs[name] = Programs(CANDIDATES[name], config)
    values = programs[name].run(data, case["seed"])
    _append(rows, emit(f"{BENCH}.losses", case, **values))
    longest = max(longest, time.monotonic() - began)


def cases(
  common: dict[str, Any],
  names: Iterable[str],
  seeds: Iterable[int],
  done: list[dict],
) -> list[dict[str, Any]]:
  """Lists the cases that have no row yet, ordered by seed."""
  known = [row["case"] for row in done]
  found = [
    common | dict(candidate=name, seed=seed)
    for seed in seeds
    for name in list(names)
  ]
  return [case for case in found if case not in known]


def stored(
  candidate: Candidate, m: jax.Array, v: jax.Array, index: int
) -> tuple[jax.Array, jax.Array, int]:
  """Encodes and decodes a leaf's moments; also returns their stored bytes."""
  codec, size, decoded = candidate.build(), 0, []
  words = stochastic.random_words(stochastic.leaf_key(0, 0, index), m.shape)
  for place, (x, group) in enumerate(zip((m, v), codec.groups, strict=True)):
    noise = stochastic.uniform(stochastic.next_words(words, place))
    found = group.encode(x, noise if group.needs_noise else None)
    size += sum(array_bytes(a.shape, a.dtype) for a in found if a.ndim)
    decoded.append(group.decode(found))
  return *decoded, size


def errors_of(candidate: Candidate, trained: Trained) -> dict[str, float]:
  """Computes a candidate's errors on the trained moments of large leaves."""
  exact, got, size = [], [], 0
  leaves = zip(leaf_paths(trained.mu), jax.tree.leaves(trained.nu), strict=True)
  for index, ((path, m), v) in enumerate(leaves):
    if not default_quantize_mask(path, m):
      continue
    *decoded, own = stored(candidate, m, v, index)
    exact.append(_quantities(m, v))
    got.append(_quantities(*decoded))
    size += own
  pairs = zip(
    map(np.concatenate, zip(*exact, strict=True)),
    map(np.concatenate, zip(*got, strict=True)),
    strict=True,
  )
  m, root, update = (relative_error(a, b) for a, b in pairs)
  count = sum(len(x[0]) for x in exact)
  return dict(
    m_error=m,
    root_v_error=root,
    update_error=update,
    bytes_per_param=size / count,
    params=count,
  )


def _quantities(m, v) -> tuple[np.ndarray, ...]:
  """Returns m, sqrt(v) and the update, flattened, in f64."""
  m, v = (np.asarray(x, np.float64).ravel() for x in (m, v))
  root = np.sqrt(v)
  return m, root, m / (root + EPS)


def _append(path: Path, row: dict) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    file.write(json.dumps(row, allow_nan=False) + "\n")


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m studies.codec_race",
    description=str(__doc__).splitlines()[0],
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for name, help_ in (
    ("errors", "measure the errors of trained moments"),
    ("losses", "train with each candidate"),
    ("table", "print the rows as a table"),
  ):
    command = commands.add_parser(name, help=help_)
    command.add_argument("--rows", type=Path, default=ROWS)
    if name != "table":
      steps = dict(errors=300, losses=200)[name]
      command.add_argument("--steps", type=args.count, default=steps)
      command.add_argument("--candidates", nargs="+", choices=CANDIDATES)
    if name != "errors":
      command.add_argument("--preset", choices=PRESETS, default="demo")
  command = commands.choices["losses"]
  command.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
  command.add_argument("--batch", type=args.count, help="default: the preset's")
  command.add_argument("--seq", type=args.count, help="default: the preset's")
  command.add_argument("--data", help="see --data.path of train.pretrain")
  command.add_argument("--data-dtype", choices=DTYPES, default="text")
  command.add_argument("--minutes", type=float, default=1e9)
  return parser


@args.command
def main(arguments: list[str] | None = None) -> int:
  """Reads the command line and runs; returns the exit status."""
  parser = _parser()
  options = parser.parse_args(arguments)
  with args.checked(parser):
    done = read_rows(options.rows, BENCH)
  if options.command == "table":
    print(table(done, options.preset))
    return 0
  names = options.candidates or [
    name for name, found in CANDIDATES.items() if found.weights is None
  ]
  if options.command == "errors":
    tokens = load_tokens(DataConfig(), MODEL.vocab_size)
    sizes = dict(steps=options.steps, batch=8, seq=64)
    trained = train_model(MODEL, tokens, **sizes)
    for name in names:
      found = CANDIDATES[name]
      if found.optimizer == "adamw":
        values = errors_of(found, trained)
        case = sizes | dict(candidate=name)
        _append(options.rows, emit(f"{BENCH}.errors", case, **values))
    return 0
  with args.checked(parser):
    sizes = dict(steps=options.steps, batch=options.batch, seq=options.seq)
    sizes = {name: x for name, x in sizes.items() if x is not None}
    config = dataclasses.replace(PRESETS[options.preset](), **sizes)
    common = {key: getattr(config, key) for key in ("steps", "batch", "seq")}
    common = dict(preset=options.preset) | common
    source = DataConfig(path=options.data, dtype=options.data_dtype)
    data = Data(load_tokens(source, config.model.vocab_size), config)
  todo = cases(common, names, options.seeds, done)
  race(config, data, todo, options.rows, options.minutes)
  return 0


if __name__ == "__main__":
  sys.exit(main())
