# SPDX-License-Identifier: Apache-2.0
"""Measures time and memory of one transformer layer, in FP8 and in BF16.

  python -m benchmarks.layer --preset llama2_7b --batch 4 --seq 2048
  python -m benchmarks.layer --preset siglip_so400m --batch 64
  python -m benchmarks.layer --compile-only --scan-memory
  python -m benchmarks.layer --compile-only l4 --variants bf16 minimal
  python -m benchmarks.layer --compile-only tpu7x:2x2x1 --variants bf16 minimal

The command prints JSON rows. U stands for 2 * d_model bytes per token, which is
the size of the residual stream in BF16.

layer.time: milliseconds and TFLOP/s. Each variant has two rows: one for the
forward pass (`mode` forward), and one for the forward and backward pass (`mode`
full), which computes the gradients of the weights and the input. FLOPs count
matmuls and attention (causal in a decoder), but not a checkpoint's second
forward pass. Rows also contain:

  temporary_bytes   memory that the compiled program needs in addition to its
                    arguments and results
  remembered_units  size of the arrays saved for the backward pass, in U; only
                    in mode full and without a checkpoint

layer.scan, with --scan-memory: the temporary memory that each additional layer
of a scan adds, in U. This is the memory of 16 layers minus the memory of 8
layers, divided by 8. Nothing is run.

If weight_cache is "codes", a training step quantizes the weights once for all
microbatches. So layer.time passes FP8 weights to the layer, and does not time
their quantization.

--preset selects a decoder layer (`train.presets`) or a layer of a vision tower:
siglip_so400m (384 pixels, 729 tokens per image) or clip_l (336 pixels, 577
tokens per image). If a model alternates between layers with and without a
sliding window (gemma2_2b), each `kind` of layer has its own rows.

--compile-only compiles everything without running it, by default for an H200.
Its value may be another GPU (`benchmarks.aot`) or a TPU topology
(`benchmarks.tpu`).
"""

import argparse
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import aot, targets
from benchmarks import arguments as args
from benchmarks.harness import emit, measure, say
from coat_jax import recipes
from coat_jax.layers import (
  RESIDUAL_NAMES,
  block_inputs_saveable,
  fp8_remat,
  with_weight_cache,
)
from coat_jax.models import VisionConfig
from coat_jax.models.config import ModelConfig
from coat_jax.models.layer import TransformerLayer
from coat_jax.recipes import CoatRecipe
from train.memory.count import residual_bytes
from train.presets import PRESETS

# Policies of jax.checkpoint, by name. A variant may also have the checkpoint
# "fp8_layer", which applies `fp8_remat` to the whole layer.
_policies = jax.checkpoint_policies
CHECKPOINTS = {
  "none": None,
  "dots": _policies.dots_with_no_batch_dims_saveable,
  "nothing": _policies.nothing_saveable,
  "names": _policies.save_only_these_names(*RESIDUAL_NAMES),
  "fp8": block_inputs_saveable,
}
# SigLIP-so400m and CLIP-L with patches of 14 x 14 pixels.
TOWERS = {
  "siglip_so400m": VisionConfig(
    family="siglip_vision",
    num_layers=27,
    d_model=1152,
    d_ff=4304,
    num_heads=16,
    image_size=384,
    patch_size=14,
  ),
  "clip_l": VisionConfig(
    family="clip_vision",
    num_layers=24,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    image_size=336,
    patch_size=14,
    norm_eps=1e-5,
  ),
}
Config = ModelConfig | VisionConfig
SCANNED_LAYERS = (8, 16)
_RESIDUAL_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Variant:
  """A recipe and a checkpoint policy to measure."""

  recipe: CoatRecipe
  checkpoint: str = "none"

  @property
  def case(self) -> dict[str, str]:
    """The values that describe the variant in a row's case."""
    r = self.recipe
    case = {"recipe": r.name, "checkpoint": self.checkpoint}
    if r.name != "bf16":
      case |= {"weight_cache": r.weight_cache}
    if r.nonlinear == "fp8":
      case |= {"residuals": r.residuals, "attention": r.attention}
    if r.experts != "bf16":
      case |= {"experts": r.experts}
    return case


_coat = recipes.coat
VARIANTS = {
  "bf16": Variant(recipes.bf16()),
  "bf16_dots": Variant(recipes.bf16(), "dots"),
  "bf16_nothing": Variant(recipes.bf16(), "nothing"),
  # Saves the same arrays as "minimal", but in BF16.
  "bf16_names": Variant(recipes.bf16(), "names"),
  "fp8_linear": Variant(recipes.fp8_linear()),
  "coat": Variant(_coat(residuals="coat")),
  "minimal": Variant(_coat()),
  "minimal_no_cache": Variant(_coat(weight_cache="none")),
  "minimal_codes": Variant(_coat(weight_cache="codes")),
  "minimal_attention": Variant(_coat(attention="fp8")),
  "minimal_experts": Variant(_coat(experts="fp8")),
  "minimal_experts_codes": Variant(_coat(experts="fp8", weight_cache="codes")),
  "block": Variant(recipes.fp8_block()),
  "minimal_nothing": Variant(_coat(), "nothing"),
  "minimal_fp8": Variant(_coat(), "fp8"),
  "minimal_fp8_layer": Variant(_coat(), "fp8_layer"),
}


def layer_flops(config: Config, batch: int, seq: int) -> dict[str, float]:
  """Counts the FLOPs of a layer's matmuls and attention, by mode."""
  d, heads = config.d_model, config.num_heads
  if isinstance(config, VisionConfig):
    h, kv_heads, of_mlp, seen = d // heads, heads, 2, seq
  else:
    h, kv_heads = config.head_width, config.num_kv_heads
    of_mlp = 2 + config.choices.is_gated
    of_mlp *= config.experts_per_token or 1
    # `seen` is the mean number of keys that a query sees. Attention is causal,
    # so `seen` is half of the sequence length, or less with a window.
    window = min(config.window or seq, seq)
    seen = window * (1 - window / (2 * seq))
  weights = d * h * (2 * heads + 2 * kv_heads) + of_mlp * d * config.d_ff
  products = 2 * batch * seq * weights
  # Attention has two matmuls in its forward pass and five in its backward pass.
  attention = 4 * batch * heads * seq * seen * h
  return {
    "forward": products + attention,
    "full": 3 * products + 3.5 * attention,
  }


def kinds_of(config: Config) -> dict[str | None, Config]:
  """Maps kinds of layers to configurations; a single kind has the key None."""
  if isinstance(config, VisionConfig) or config.full_every is None:
    return {None: config}
  window = dataclasses.replace(config, full_every=None)
  return {"window": window, "full": dataclasses.replace(window, window=None)}


def make_layer(config: Config, recipe: CoatRecipe) -> nnx.Module:
  """Creates a layer with random parameters."""
  return TransformerLayer(config, recipe, rngs=nnx.Rngs(0))


class Layer:
  """A variant of a layer, as pure functions of its parameters and inputs."""

  def __init__(self, config: Config, variant: Variant):
    self.recipe = variant.recipe
    self.checkpoint = variant.checkpoint
    layer = nnx.eval_shape(lambda: make_layer(config, self.recipe))
    self.graph, self.params = nnx.split(layer, nnx.Param)

  def forward(self, params, x, codes=None):
    """Runs the layer on x [batch, seq, d]; `codes` come from `weight_codes`."""
    graph, state = self._cached(params)
    if codes is not None:
      state = nnx.merge_state(params, codes)
    return self._saving(graph, in_scan=False)(state, x)

  def weight_codes(self, params):
    """Quantizes the weights once for several calls (weight_cache="codes")."""
    return nnx.split_state(self._cached(params)[1], nnx.Param, ...)[1]

  def scanned(self, params, x):
    """Scans over layers, given their stacked parameters."""
    graph, state = self._cached(params)
    layer = self._saving(graph, in_scan=True)
    return jax.lax.scan(lambda x, state: (layer(state, x), None), x, state)[0]

  def _cached(self, params):
    layer = nnx.merge(self.graph, params)
    return nnx.split(with_weight_cache(layer))

  def _saving(self, graph, *, in_scan: bool) -> Callable:
    layer = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    # Outside a scan, common-subexpression elimination would merge the second
    # forward pass with the first.
    prevent_cse = not in_scan
    if self.checkpoint == "fp8_layer":
      return fp8_remat(layer, 1, recipe=self.recipe, prevent_cse=prevent_cse)
    policy = CHECKPOINTS[self.checkpoint]
    if policy is None:
      return layer
    return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def with_gradients(forward: Callable) -> Callable:
  """Returns a function of (params, x, dy) that computes y, dparams and dx."""

  def full(params, x, dy, *codes):
    y, backward = jax.vjp(lambda *args: forward(*args, *codes), params, x)
    return y, *backward(dy)

  return full


def make_arrays(layer: Layer, config: Config, shape, dtype):
  """Creates random parameters in `dtype`, and random x and dy in BF16."""
  params = nnx.state(make_layer(config, layer.recipe), nnx.Param)
  keys = jax.random.split(jax.random.key(1))
  x, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
  return jax.tree.map(lambda p: p.astype(dtype), params), x, dy


def make_specs(layer: Layer, shape, dtype, layers: int | None = None):
  """Returns `make_arrays`'s shapes; for a scan, pass the number of `layers`."""
  stack = () if layers is None else (layers,)
  params = jax.tree.map(
    lambda p: jax.ShapeDtypeStruct((*stack, *p.shape), dtype), layer.params
  )
  x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  return params, x, x


def temporary_bytes(fn: Callable, specs, *, target: str | None) -> int:
  """Returns `fn`'s temporary bytes on `target`; None means this machine."""
  if target is None:
    return aot.temporary_bytes(jax.jit(fn).lower(*specs).compile())
  return aot.temporary_bytes(targets.compile_for(target, fn, *specs))


def time_rows(config, variant, case, options) -> list[dict]:
  """Measures the modes forward and full; prints a row for each."""
  layer = Layer(config, variant)
  shape = (options.batch, options.seq, config.d_model)
  flops = layer_flops(config, options.batch, options.seq)
  specs = make_specs(layer, shape, options.param_dtype)
  further = {}
  if variant.checkpoint == "none":
    tokens = min(_RESIDUAL_TOKENS, options.seq)
    # Plain JAX saves the same arrays as the kernels do, but needs no GPU.
    recipe = dataclasses.replace(variant.recipe, implementation="xla")
    counted = residual_bytes(config, recipe, tokens=tokens)
    further["remembered_units"] = counted["total"] / (2 * config.d_model)
  if not options.compile_only:
    arrays = make_arrays(layer, config, shape, options.param_dtype)
  codes, code_specs = (), ()
  if variant.recipe.weight_cache == "codes":
    code_specs = (jax.eval_shape(layer.weight_codes, specs[0]),)
    if not options.compile_only:
      codes = (jax.jit(layer.weight_codes)(arrays[0]),)
  rows = []
  for mode, fn, count in (
    ("forward", layer.forward, 2),
    ("full", with_gradients(layer.forward), 3),
  ):
    values = dict(
      temporary_bytes=temporary_bytes(
        fn, specs[:count] + code_specs, target=options.compile_only
      )
    )
    if not options.compile_only:
      timing = measure(fn, *arrays[:count], *codes, repeats=options.repeats)
      values |= timing.row | {"tflops": timing.tflops(flops[mode])}
    if mode == "full":
      values |= further
    rows.append(emit("layer.time", case | {"mode": mode}, **values))
  return rows


def scan_row(config, variant, case, options) -> dict:
  """Prints a row with the memory that each additional layer of a scan adds."""
  layer = Layer(config, variant)
  shape = (options.batch, options.seq, config.d_model)
  few, many = (
    temporary_bytes(
      with_gradients(layer.scanned),
      make_specs(layer, shape, options.param_dtype, layers),
      target=options.compile_only,
    )
    for layers in SCANNED_LAYERS
  )
  unit = 2 * options.batch * options.seq * config.d_model
  growth = (many - few) / (SCANNED_LAYERS[1] - SCANNED_LAYERS[0])
  return emit(
    "layer.scan",
    case,
    units_per_layer=growth / unit,
    temporary_bytes={SCANNED_LAYERS[0]: few, SCANNED_LAYERS[1]: many},
  )


def parse(arguments: list[str] | None) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.layer",
    description="Measures time and memory of one transformer layer.",
  )
  parser.add_argument(
    "--preset", choices=[*PRESETS, *TOWERS], default="llama2_7b"
  )
  parser.add_argument("--batch", type=args.count, default=4)
  parser.add_argument(
    "--seq",
    type=args.count,
    help="tokens per sequence (default: 2048); not for vision towers",
  )
  parser.add_argument("--param-dtype", choices=("bf16", "f32"), default="bf16")
  parser.add_argument(
    "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)
  )
  parser.add_argument("--scan-memory", action="store_true")
  parser.add_argument(
    "--compile-only",
    nargs="?",
    const="h200",
    type=targets.parse,
    metavar="TARGET",
    help="compile without running, for an H200 or for TARGET: one of "
    f"{', '.join(aot.GPUS)}, or TPUs such as v6e:2x2 or tpu7x:2x2x1",
  )
  parser.add_argument("--repeats", type=args.count, default=20)
  options = parser.parse_args(arguments)
  if options.preset in TOWERS and options.seq is not None:
    parser.error(
      f"--seq is only for decoders, got {options.seq} with {options.preset}, "
      "where the image size sets the number of tokens; leave --seq out"
    )
  dtypes = {"bf16": jnp.bfloat16, "f32": jnp.float32}
  options.param_dtype = dtypes[options.param_dtype]
  return options


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  options = parse(arguments)
  if options.compile_only:
    aot.only_compile()
  if options.preset in TOWERS:
    config = TOWERS[options.preset]
    options.seq = config.num_tokens
  else:
    config = PRESETS[options.preset]().model
    options.seq = options.seq or 2048
  rows = []
  for name in options.variants:
    say(f"{options.preset}: {name}")
    variant = VARIANTS[name]
    case = dict(
      preset=options.preset,
      batch=options.batch,
      seq=options.seq,
      param_dtype=jnp.dtype(options.param_dtype).name,
      variant=name,
      **variant.case,
    )
    if options.compile_only:
      case |= {"compiled_for": targets.device_kind(options.compile_only)}
    for kind, of_kind in kinds_of(config).items():
      of_case = case if kind is None else case | {"kind": kind}
      if options.scan_memory:
        rows.append(scan_row(of_kind, variant, of_case, options))
      else:
        rows += time_rows(of_kind, variant, of_case, options)
  return rows


if __name__ == "__main__":
  main()
