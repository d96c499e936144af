# SPDX-License-Identifier: Apache-2.0
"""Computes the memory of layers, optimizer states and whole training steps.

  python -m benchmarks.memory residuals --preset llama2_7b --tokens 256
  python -m benchmarks.memory state --preset llama2_7b
  python -m benchmarks.memory plan

No GPU is needed. Each command prints JSON rows:

memory.residuals: the bytes per token that one decoder layer saves for its
backward pass, for each kind of array (`train.memory.count`). We count the
arrays that `jax.vjp` of the layer saves. With the `bf16` recipe, XLA may save
slightly less. `units` is the total in units of U = 2 * d_model, the bytes per
token of the residual stream in BF16. For comparison, rows also contain these
numbers, in U:

  paper_units      the number in Table 2 of arXiv:2410.19313, which assumes
                   d_ff = 8/3 * d_model and does not count scales; for
                   fp8_linear, the table's number for TransformerEngine
  reference_units  only for the `coat` recipe: our count, including scales, of
                   what the COAT authors' code saves for a Llama layer of these
                   sizes. `with_rope` counts a second copy of q and k for RoPE,
                   as the paper does; `without_rope` does not.

memory.state: for each codec, the bytes per parameter of the parameters (f32 or
BF16), the gradients and the optimizer's state, computed from shapes.

memory.plan: the memory of whole training steps compiled for H200s; see
`benchmarks.planned`. Some steps take minutes to compile.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import aot, planned, training_step
from benchmarks import arguments as args
from benchmarks.harness import emit
from coat_jax import coat_adamw, codecs, recipes
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.optimizer.report import state_bytes
from train.memory.count import residual_bytes
from train.presets import PRESETS

RECIPES = (
  recipes.bf16(),
  recipes.fp8_linear(),
  recipes.coat(residuals="coat"),
  recipes.coat(residuals="minimal"),
  recipes.coat(residuals="minimal", attention="fp8"),
)
PAPER_UNITS = {"bf16": 22.66, "fp8_linear": 18.33, "coat": 13.33}
CODECS = {name: codecs.build(name) for name in codecs.names()}


def reference_bytes(config: ModelConfig) -> int:
  """Counts the bytes per token of `without_rope` in `reference_units`."""
  d, f, h = config.d_model, config.d_ff, config.head_width
  n, kv = config.num_heads, config.num_kv_heads
  # For each of two norms: input, scales, an f32 statistic, and output.
  norm = 2 * (d + 2 * d // 16 + 4) + 2 * d
  attention = 2 * (2 * n + 2 * kv) * h + 4 * n  # q, k, v, output; log-sum-exp.
  activation = 3 * (f + 2 * f // 16)  # Gate, up and SiLU(gate), with scales.
  return norm + attention + activation + f  # The last f is SiLU(gate) * up.


def residuals(preset: str, tokens: int) -> list[dict]:
  """Prints a row for each recipe."""
  config = PRESETS[preset]().model
  unit = 2 * config.d_model
  rope = 2 * (config.num_heads + config.num_kv_heads) * config.head_width
  without_rope = reference_bytes(config)
  rows = []
  for r in RECIPES:
    counted = residual_bytes(config, r, tokens=tokens)
    # With recipes other than coat, the option `residuals` has no effect.
    kept = r.residuals if r.name == "coat" else "autodiff"
    case = dict(preset=preset, recipe=r.name, residuals=kept)
    case |= dict(attention=r.attention, tokens=tokens)
    further = dict(
      units_by_kind={k: v / unit for k, v in counted.items() if k != "total"},
      paper_units=PAPER_UNITS[r.name],
    )
    if r.name == "coat":
      further["reference_units"] = {
        "with_rope": (without_rope + rope) / unit,
        "without_rope": without_rope / unit,
      }
    rows.append(
      emit(
        "memory.residuals",
        case,
        bytes_per_token_layer=counted,
        units=counted["total"] / unit,
        **further,
      )
    )
  return rows


def state(preset: str) -> list[dict]:
  """Prints a row for each dtype of parameters and each codec."""
  config = PRESETS[preset]().model
  rows = []
  for dtype in (jnp.float32, jnp.bfloat16):
    params = abstract_params(config, dtype)
    count = sum(x.size for x in jax.tree.leaves(params))
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    for name, codec in CODECS.items():
      optimizer = coat_adamw(1e-3, codec=codec)
      optimizer_bytes = state_bytes(jax.eval_shape(optimizer.init, params))
      rows.append(
        emit(
          "memory.state",
          dict(preset=preset, codec=name, params=jnp.dtype(dtype).name),
          bytes_per_param=dict(
            params=stored / count,
            grads=stored / count,  # A gradient has its parameter's dtype.
            optimizer=optimizer_bytes.bytes_per_param,
          ),
          num_params=count,
        )
      )
  return rows


def abstract_params(config: ModelConfig, dtype):
  """Returns the shapes of a decoder's parameters, as nested dicts."""
  model = nnx.eval_shape(
    lambda: Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
  )
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, dtype),
    nnx.to_pure_dict(nnx.state(model, nnx.Param)),
  )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  options = parse(arguments)
  if options.command == "state":
    return state(options.preset)
  if options.command == "residuals":
    return residuals(options.preset, options.tokens)
  aot.only_compile()
  return list(planned.rows(options.cases))


def parse(arguments: list[str] | None) -> argparse.Namespace:
  """Reads and checks the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.memory",
    description=__doc__.splitlines()[0],
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for name in ("residuals", "state"):
    command = commands.add_parser(name)
    command.add_argument("--preset", choices=PRESETS, default="llama2_7b")
    if name == "residuals":
      command.add_argument("--tokens", type=args.count, default=256)
  command = commands.add_parser("plan")
  for option, values, choices in (
    ("presets", list(planned.LOADS), planned.LOADS),
    ("variants", planned.VARIANTS, training_step.VARIANTS),
  ):
    command.add_argument(
      f"--{option}", nargs="+", choices=choices, default=values
    )
  command.add_argument(
    "--gpus", nargs="+", type=args.count, default=planned.GPUS
  )
  options = parser.parse_args(arguments)
  if options.command == "plan":
    chosen = options.presets, options.gpus, options.variants
    options.cases = planned.cases(*chosen)
    with args.checked(command):
      for case in options.cases:
        planned.configure(**case)
  return options


if __name__ == "__main__":
  main()
