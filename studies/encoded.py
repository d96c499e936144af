# SPDX-License-Identifier: Apache-2.0
"""Compares training with encoded and with f32 states, for optax's optimizers.

  python -m studies.encoded [--optimizers lion muon] [--codec coat]
    [--steps 100]

Each optimizer trains a byte-level Llama on the source text of Python's standard
library, once with an f32 state and once with `coat_jax.encoded`, on the same
batches. The gradient's global norm is clipped to 1.

The command prints a JSON row, `encoded`, for each optimizer and each choice of
state fields to encode. The choice "default" encodes the fields that `encoded`
selects by default; "all" also encodes copies of parameters. A row contains the
bytes per parameter of both states, and the mean losses over the last sixth of
the steps.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax import codecs, encoded, recipes
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from coat_jax.optimizer import default_field_rule, state_bytes
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, load_tokens

MODEL = ModelConfig(
  family="llama",
  num_layers=1,
  d_model=128,
  d_ff=256,
  num_heads=4,
  num_kv_heads=4,
  vocab_size=256,
)
BATCH, SEQ = 8, 32


def _scheduled(peak: float, make: Callable[..., Any]) -> Callable[[int], Any]:
  """Returns a function that builds an optimizer for a number of steps.

  The learning rate warms up over a tenth of these steps, then decays along a
  cosine.
  """
  return lambda steps: make(
    optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps, peak / 10)
  )


OPTIMIZERS: dict[str, Callable[[int], optax.GradientTransformation]] = {
  "adamw": _scheduled(2e-3, lambda rate: optax.adamw(rate, 0.9, 0.95)),
  "lion": _scheduled(3e-4, optax.lion),
  "momentum": _scheduled(0.3, lambda rate: optax.sgd(rate, momentum=0.9)),
  "nesterov": _scheduled(
    0.3, lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True)
  ),
  "adan": _scheduled(2e-3, optax.adan),
  "adafactor": _scheduled(
    1e-2, lambda rate: optax.adafactor(rate, momentum=0.9)
  ),
  "adabelief": _scheduled(2e-3, optax.adabelief),
  "lamb": _scheduled(1e-2, optax.lamb),
  "schedule_free": lambda steps: optax.contrib.schedule_free_adamw(
    5e-3, warmup_steps=steps // 10
  ),
  "muon": _scheduled(1e-2, optax.contrib.muon),
  "prodigy": lambda steps: optax.contrib.prodigy(1.0),
}
RULES = {
  "default": default_field_rule,
  "all": lambda path: default_field_rule(path) or "mu",
}


class Problem:
  """A model and batches, which are the same for every optimizer."""

  def __init__(self, model: ModelConfig, steps: int, seed: int):
    self.steps = steps
    graph, self.params = nnx.split(
      Decoder(model, recipes.bf16(), rngs=nnx.Rngs(seed)), nnx.Param
    )
    tokens = load_tokens(DataConfig(), model.vocab_size)
    batches = train_iterator(tokens, seq_len=SEQ, batch_size=BATCH, seed=seed)
    self.batches = [next(batches)["tokens"] for _ in range(steps)]
    self.gradient = jax.jit(
      jax.value_and_grad(
        lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens)
      )
    )

  def run(self, optimizer: optax.GradientTransformation) -> tuple[float, Any]:
    """Returns the mean loss of the last sixth of the steps, and the state."""
    params = self.params
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(grads, state, params):
      updates, state = optimizer.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    losses = []
    for tokens in self.batches:
      loss, grads = self.gradient(params, tokens)
      params, state = update(grads, state, params)
      losses.append(loss)
    last = jnp.stack(losses[-max(self.steps // 6, 1) :])
    return float(jnp.mean(last)), state


def compare(
  name: str, problem: Problem, codec: codecs.MomentCodec, seed: int
) -> None:
  """Prints the rows of one optimizer."""
  inner = OPTIMIZERS[name](problem.steps)
  exact, state = problem.run(inner)
  size = sum(x.size for x in jax.tree.leaves(problem.params))
  plain = sum(x.nbytes for x in jax.tree.leaves(state)) / size
  seen = []
  for label, rule in RULES.items():
    solver = encoded(inner, codec, fields=rule)
    shapes = jax.eval_shape(solver.init, problem.params)
    if (total := state_bytes(shapes).total) in seen:
      continue  # Without copies of parameters, "all" is the same as "default".
    seen.append(total)
    loss, _ = problem.run(solver)
    emit(
      "encoded",
      dict(optimizer=name, fields=label, codec=codec.name, seed=seed),
      steps=problem.steps,
      parameters=size,
      plain_bytes=plain,
      encoded_bytes=total / size,
      plain_loss=exact,
      encoded_loss=loss,
    )
    say(
      f"{name:14s} {label:8s} {plain:5.2f} -> {total / size:5.2f} B/param | "
      f"loss {exact:.4f} -> {loss:.4f} ({loss - exact:+.4f})"
    )


@args.command
def main(arguments: list[str] | None = None) -> None:
  """Reads the command line and runs."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument(
    "--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS)
  )
  parser.add_argument("--codec", default="coat", help="name of a codec")
  parser.add_argument("--steps", type=args.count, default=100)
  parser.add_argument(
    "--seeds", type=args.count, default=1, help="number of seeds"
  )
  options = parser.parse_args(arguments)
  with args.checked(parser):
    codec = codecs.build(options.codec)
  for seed in range(options.seeds):
    problem = Problem(MODEL, options.steps, seed)
    for name in options.optimizers:
      compare(name, problem, codec, seed)


if __name__ == "__main__":
  main()
