# SPDX-License-Identifier: Apache-2.0
"""Measures how accurately each codec stores Adam's moments.

  python -m studies.accuracy codecs [--steps 300] [--out PICTURE.png]
    [--codecs coat package.module:function]

The moments come from a small model (`studies.trained_moments`).

accuracy.codecs: the error of one step. The trained moments m and v are encoded
and decoded. The next gradient is sampled from N(m, v - m^2), the distribution
that the moments describe. Then the Adam update with the decoded moments is
compared with the exact update. A row contains:

  update_rms_error  RMS(update - exact) / RMS(exact)
  max_update        largest update, which is about 1 unless some v became zero
  zeroed_v          fraction of the nonzero values of v that became zero

accuracy.tracking: the drift over many steps. At each of 2000 steps, the v of
16384 elements is encoded and decoded. The magnitudes of gradients come from the
trained v. After half of the steps, the gradients of every second element shrink
to a tenth. A row contains the median and the 10th and 90th percentiles of
stored v / exact v at the end, over the elements whose gradients shrank. Keys
with the prefix `unchanged_` cover the elements whose gradients did not shrink.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax import codecs
from coat_jax.codecs.factored import Factored
from coat_jax.codecs.group import GroupCodec
from coat_jax.codecs.integers import LogUniform
from coat_jax.numerics import stochastic
from studies.trained_moments import (
  B1,
  B2,
  EPS,
  GROUP_SIZE,
  Moments,
  train_moments,
)
from train.plot import check_figure

TRACKED_B2 = (0.95, 0.99, 0.999)
TRACKED_GROUPS = 128
SHRINK = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
  """A codec, and its name in rows and in the figure."""

  codec: codecs.MomentCodec
  rounding: str
  second: str | None = None
  note: str | None = None

  @property
  def row(self) -> dict:
    """The `case` of the codec's rows."""
    case = {"codec": self.codec.name, "rounding": self.rounding}
    return case | ({"second": self.second} if self.second else {})

  @property
  def label(self) -> str:
    """The name in the figure."""
    second = f" v {self.second.upper()}" if self.second == "e5m2" else ""
    return f"{self.codec.name}{second}, {self.rounding}"


def cases(names: Sequence[str] | None = None) -> list[Case]:
  """Lists codecs with each of their roundings.

  By default, these are all registered codecs, and a variant that the library
  does not offer: log8 with rounding to nearest. Codecs with factored moments
  are left out, because they need whole matrices instead of groups.
  """
  found = []
  for name in codecs.names() if names is None else names:
    for options in codecs.variants(name):
      codec = codecs.build(name, **options)
      if codec.nu == Factored():
        continue
      rounding = options.get("rounding", "nearest")
      rounding = "none" if codec == codecs.float32() else rounding
      found.append(Case(codec, rounding, options.get("second")))
  if names is not None:
    return found
  # `codecs.log8` rejects rounding to nearest, so construct the `MomentCodec`.
  grid = codecs.MomentCodec(
    name="log8",
    mu=LogUniform(GROUP_SIZE, "nearest", signed=True),
    nu=LogUniform(GROUP_SIZE, "nearest", signed=False),
  )
  note = "grid only: group codec called directly, codecs.log8 refuses nearest"
  return [*found, Case(grid, "nearest", note=note)]


def codec_row(case: Case, moments: Moments, parts: dict[str, slice]) -> dict:
  """Returns the values of a row: a codec's errors after one step."""
  encoded, stored = store(case.codec, moments)
  found = update_errors(moments, stored)
  error, exact = (np.asarray(found[x], float) for x in ("error", "exact"))

  def relative(part: slice) -> float:
    return float(np.sqrt(error[part].sum() / exact[part].sum()))

  # Statistics that a codec does not store are scalar zeros.
  size = sum(x.nbytes for x in jax.tree.leaves(encoded) if x.ndim)
  row = {
    "bytes_per_param": size / moments.mu.size,
    "update_rms_error": relative(slice(None)),
    "max_update": float(found["max_update"]),
    "zeroed_v": int(found["zeroed"]) / int(found["nonzero"]),
    "update_rms_error_by_part": {x: relative(parts[x]) for x in parts},
    "params": moments.mu.size,
  }
  return row | ({"note": case.note} if case.note else {})


@functools.partial(jax.jit, static_argnums=0)
def store(
  codec: codecs.MomentCodec, moments: Moments
) -> tuple[tuple[codecs.Encoded, codecs.Encoded], Moments]:
  """Encodes moments; returns the encoded and the decoded moments."""
  words = stochastic.random_words(
    stochastic.leaf_key(0, 0, 0), moments.mu.shape
  )
  mu = _encode(codec.mu, moments.mu, stochastic.uniform(words))
  nu = _encode(
    codec.nu, moments.nu, stochastic.uniform(stochastic.next_words(words))
  )
  return (mu, nu), Moments(codec.mu.decode(mu), codec.nu.decode(nu))


def _encode(group_codec, x, noise):
  return group_codec.encode(x, noise if group_codec.needs_noise else None)


@jax.jit
def update_errors(moments: Moments, stored: Moments) -> dict:
  """Compares the next Adam update from stored moments with the exact update.

  "error" and "exact" are sums of squares per group. "nonzero" is the number of
  nonzero values of v, and "zeroed" is how many of these values became zero.
  """
  spread = jnp.sqrt(jnp.maximum(moments.nu - moments.mu**2, 0))
  normal = jax.random.normal(jax.random.key(0), spread.shape)
  gradient = moments.mu + spread * normal
  exact, update = _adam(moments, gradient), _adam(stored, gradient)
  nonzero = moments.nu > 0
  return {
    "error": jnp.sum((update - exact) ** 2, axis=-1),
    "exact": jnp.sum(exact**2, axis=-1),
    "max_update": jnp.max(jnp.abs(update)),
    "nonzero": jnp.sum(nonzero),
    "zeroed": jnp.sum(nonzero & (stored.nu == 0)),
  }


def _adam(moments: Moments, gradient):
  # After hundreds of steps, the bias corrections are close to 1.
  mu = B1 * moments.mu + (1 - B1) * gradient
  nu = B2 * moments.nu + (1 - B2) * gradient**2
  return mu / (jnp.sqrt(nu) + EPS)


def gradient_sizes(moments: Moments) -> jax.Array:
  """Returns sqrt(v) of 128 groups from the whole model, [groups, 128]."""
  # Embeddings of bytes that do not occur have v = 0, so skip them.
  rows = moments.nu[jnp.all(moments.nu > 0, axis=-1)]
  index = np.linspace(0, len(rows) - 1, TRACKED_GROUPS).astype(int)
  return jnp.sqrt(rows[index])


@functools.partial(jax.jit, static_argnames=("codec", "steps", "every"))
def track(codec: GroupCodec, sizes: jax.Array, b2, *, steps: int, every: int):
  """Encodes and decodes v at each step; gradients shrink halfway.

  `sizes` [groups, n] are standard deviations of gradients. Returns the ratio of
  stored to exact v at the end, f32 [groups, n]. Also returns the ratio's median
  over the elements whose gradients shrink, once per `every` steps.
  """
  shrinks = jnp.arange(sizes.shape[-1]) % 2 == 0

  def step(carry, i):
    encoded, exact = carry
    scale = jnp.where(shrinks & (i >= steps // 2), SHRINK, 1.0)
    scale = jnp.broadcast_to(scale, sizes.shape)
    key = jax.random.fold_in(jax.random.key(1), i)
    normal = jax.random.normal(key, sizes.shape)
    square = (sizes * scale * normal) ** 2
    words = stochastic.random_words(stochastic.leaf_key(0, i, 0), sizes.shape)
    stored = b2 * codec.decode(encoded) + (1 - b2) * square
    encoded = _encode(
      codec, stored, stochastic.uniform(stochastic.next_words(words))
    )
    return (encoded, b2 * exact + (1 - b2) * square), None

  def block(carry, start):
    carry, _ = jax.lax.scan(step, carry, start + jnp.arange(every))
    encoded, exact = carry
    ratio = codec.decode(encoded) / exact
    return carry, jnp.median(ratio[:, ::2])

  start = sizes**2
  words = stochastic.random_words(stochastic.leaf_key(1, 0, 0), sizes.shape)
  first = _encode(
    codec, start, stochastic.uniform(stochastic.next_words(words))
  )
  (encoded, exact), trace = jax.lax.scan(
    block, (first, start), jnp.arange(0, steps, every)
  )
  return codec.decode(encoded) / exact, trace


def tracking_row(ratio: jax.Array) -> dict:
  """Returns the values of a row: percentiles of stored v / exact v."""
  ratio = np.asarray(ratio, np.float64)
  values = {}
  for prefix, part in (("", ratio[:, ::2]), ("unchanged_", ratio[:, 1::2])):
    low, median, high = np.percentile(part, [10, 50, 90])
    values[f"{prefix}median_ratio"] = float(median)
    values[f"{prefix}p10"], values[f"{prefix}p90"] = float(low), float(high)
  return values


def run_codecs(
  moments: Moments,
  parts: dict[str, slice],
  chosen: list[Case],
  *,
  tracking_steps: int = 2000,
) -> tuple[list[dict], list[dict], dict]:
  """Prints the rows; returns one-step rows, tracking rows, and traces of v."""
  one_step, tracking, traces = [], [], {}
  for case in chosen:
    values = codec_row(case, moments, parts)
    row = emit("accuracy.codecs", case.row, **values)
    one_step.append(row | {"label": case.label})
  sizes = gradient_sizes(moments)
  every = max(tracking_steps // 100, 1)
  for case in chosen:
    for b2 in TRACKED_B2:
      ratio, trace = track(
        case.codec.nu, sizes, b2, steps=tracking_steps, every=every
      )
      tracking.append(
        emit(
          "accuracy.tracking",
          case.row | {"b2": b2},
          **tracking_row(ratio),
          steps=tracking_steps,
        )
      )
      traces[case.label, b2] = every * (1 + np.arange(len(trace))), trace
  return one_step, tracking, traces


def draw(one_step: list[dict], traces: dict, out: Path, b2=0.99) -> None:
  """Draws the errors of one step, and the traces of v for one b2."""
  figure = Figure(figsize=(13, 5), layout="constrained")
  left, right = figure.subplots(1, 2)
  rows = [row for row in one_step if row["update_rms_error"] > 0]
  # All roundings of a codec have the same color. The bar of rounding to nearest
  # is pale, and its line is dashed.
  names = {row["label"]: row["label"].split(",")[0] for row in rows}
  palette = {x: f"C{i}" for i, x in enumerate(dict.fromkeys(names.values()))}
  colors = {label: palette[name] for label, name in names.items()}
  for row in rows:
    label = row["label"]
    alpha = 1.0 if "stochastic" in label else 0.5
    left.barh(label, row["update_rms_error"], color=colors[label], alpha=alpha)
    text = f" {row['update_rms_error']:.2g} ({row['bytes_per_param']:.2f} B)"
    left.text(row["update_rms_error"], row["label"], text, va="center")
  left.invert_yaxis()
  left.set_xscale("log")
  left.set_xlim(1e-3, 30)
  left.set_xlabel("relative RMS error of the next Adam update")
  left.set_title("One step (bytes per parameter, both moments)")
  for (label, at), (steps, trace) in traces.items():
    if at == b2 and label in colors:
      style = "-" if "stochastic" in label else "--"
      right.plot(steps, trace, style, color=colors[label], label=label)
  right.axhline(1, color="black", linewidth=0.6)
  right.set_yscale("log")
  right.set_xlabel("step; gradients shrink to a tenth halfway")
  right.set_ylabel("stored v / exact v, median")
  right.set_title(f"Many steps, b2 = {b2}, elements whose gradients shrink")
  right.legend(fontsize="small")
  figure.savefig(out, dpi=120)


@args.command
def main(arguments: list[str] | None = None) -> None:
  """Reads the command line and runs."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.accuracy", description=__doc__.splitlines()[0]
  )
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser(
    "codecs", help="measure the error of one step and the drift over many"
  )
  command.add_argument(
    "--steps", type=args.count, default=300, help="number of training steps"
  )
  command.add_argument(
    "--codecs", nargs="+", help="names of codecs; default: all registered"
  )
  command.add_argument(
    "--out", type=Path, default=Path("docs/figures/accuracy.png")
  )
  options = parser.parse_args(arguments)
  with args.checked(parser):
    chosen = cases(options.codecs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    check_figure(options.out)
  one_step, _, traces = run_codecs(*train_moments(options.steps), chosen)
  draw(one_step, traces, options.out)
  say(f"drew {options.out}")


if __name__ == "__main__":
  main()
