# SPDX-License-Identifier: Apache-2.0
"""Compares the planned memory of LLaVA 1.5 7B's training steps with XLA's peak.

  python -m studies.vision_memory
  python -m studies.vision_memory --stages all --batch 4

Weights and gradients are BF16, moments are FP8, and layers use the `coat`
recipe. Frozen parts have neither gradients nor moments. In a row, `peak_bytes`
is the peak of the step that XLA compiles for an H200, `planned_bytes` is the
peak according to `train.memory`, and `error` is planned_bytes / peak_bytes - 1.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import aot
from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax import codecs, recipes
from coat_jax.models import (
  ModelConfig,
  VisionConfig,
  VisionLanguageConfig,
  VisionLanguageModel,
  loss_fn,
)
from coat_jax.models.initialization import stored_in
from coat_jax.optimizer import fused_coat_adamw
from train.finetune_config import FinetuneConfig, Trained
from train.memory.step import AbstractState, Memory, fullest, plan

# The sizes of llava-hf/llava-1.5-7b-hf.
LLAVA_7B = VisionLanguageConfig(
  text=ModelConfig(
    family="llama",
    num_layers=32,
    d_model=4096,
    d_ff=11008,
    num_heads=32,
    num_kv_heads=32,
    vocab_size=32064,
    norm_eps=1e-5,
  ),
  vision=VisionConfig(
    family="clip_vision",
    num_layers=24,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    image_size=336,
    patch_size=14,
  ),
  image_token=32000,
)
# For each stage, the parts of the model that are trained.
STAGES: dict[Trained, tuple[str, ...]] = {
  "projector": ("projector",),
  "decoder": ("projector", "decoder"),
  "all": ("projector", "decoder", "tower"),
}


def abstract(stage: Trained):
  """Returns a graph, abstract parameters, abstract moments and an optimizer."""
  model = nnx.eval_shape(
    lambda: VisionLanguageModel(
      LLAVA_7B,
      recipes.coat(),
      store=stored_in("vision_memory", jnp.bfloat16),
      rngs=nnx.Rngs(0),
    )
  )
  graph, state = nnx.split(model, nnx.Param)
  params = nnx.to_pure_dict(state)
  optimizer = fused_coat_adamw(1e-5, codec=codecs.fp8())
  trained = {name: params[name] for name in STAGES[stage]}
  return graph, params, jax.eval_shape(optimizer.init, trained), optimizer


def compile_step(stage: Trained, *, batch: int, seq: int, images: int):
  """Compiles a step; also returns abstract parameters and moments.

  Each sequence has room for `images` images.
  """
  graph, params, moments, optimizer = abstract(stage)
  names = STAGES[stage]

  def step(params, moments, tokens, pixels):
    trained = {name: params[name] for name in names}

    def loss(trained):
      return loss_fn(nnx.merge(graph, params | trained), tokens, pixels)

    value, grads = jax.value_and_grad(loss)(trained)
    norm = optax.tree.norm(jax.tree.map(jnp.float32, grads))
    scale = jnp.minimum(1.0, 1.0 / norm)
    new, moments = optimizer.apply(grads, moments, trained, grad_scale=scale)
    return params | new, moments, value

  tower = LLAVA_7B.vision
  side, channels = tower.image_size, tower.num_channels
  compiled = aot.compile_for_h200(
    step,
    params,
    moments,
    jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32),
    jax.ShapeDtypeStruct((batch, images, channels, side, side), jnp.float32),
    donate=(0, 1),
  )
  return compiled, params, moments


def planned(
  stage: Trained, params, moments, *, batch: int, seq: int, images: int
) -> dict[str, Memory]:
  """Returns the planned memory at each point of `compile_step`'s step."""
  config = FinetuneConfig(
    init_from="llava-1.5-7b-hf",
    out="no run",
    model=LLAVA_7B,
    trained=stage,
    params="bfloat16",
    batch=batch,
    seq=seq,
  )
  return plan(config, AbstractState(params, moments), images_each=images)


def row(stage: Trained, *, batch: int, seq: int, images: int) -> dict:
  """Compiles a step and plans its memory; prints and returns its row."""
  sizes = dict(batch=batch, seq=seq, images=images)
  compiled, params, moments = compile_step(stage, **sizes)
  peak = aot.peak_bytes(compiled)
  moment, memory = fullest(planned(stage, params, moments, **sizes))
  return emit(
    "memory.vision_plan",
    dict(
      model=f"llava, {LLAVA_7B.text.num_layers} layers",
      trained=stage,
      **sizes,
      compiled_for="NVIDIA H200",
    ),
    peak_bytes=peak,
    planned_bytes=memory.total,
    error=memory.total / peak - 1,
    moment=moment,
  )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(prog="python -m studies.vision_memory")
  parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
  parser.add_argument("--batch", type=args.count, default=4)
  parser.add_argument("--seq", type=args.count, default=2048)
  parser.add_argument("--images", type=args.count, default=2)
  options = parser.parse_args(arguments)
  aot.only_compile()
  rows = []
  for stage in options.stages:
    say(f"LLaVA 1.5 7B, trained: {stage}")
    sizes = dict(batch=options.batch, seq=options.seq, images=options.images)
    rows.append(row(stage, **sizes))
  return rows


if __name__ == "__main__":
  main()
