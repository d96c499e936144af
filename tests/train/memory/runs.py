# SPDX-License-Identifier: Apache-2.0
"""Plans of presets, from given numbers of parameters."""

import dataclasses

import jax

from train.memory.count import saved_bytes
from train.memory.step import AbstractState, plan
from train.presets import PRESETS

RECIPES = {
  "bf16": dict(recipe="bf16"),
  "fp8_linear": dict(recipe="fp8_linear"),
  "coat": dict(recipe="coat", residuals="coat"),
  "minimal": dict(recipe="coat"),
}


class Case:
  """Plans steps of a model; holds the sizes of the model and of a batch.

  Attributes:
    u: bytes of the residual stream in BF16.
    a: number of values in gate (tokens * d_ff).
    qkv, gate_up, head: numbers of weights.
    layer: number of weights in the four matrices of a layer.
  """

  def __init__(self, preset, parameters, batch, seq, **model):
    config = PRESETS[preset]()
    self.model = dataclasses.replace(config.model, **model)
    self.config = dataclasses.replace(
      config, model=self.model, batch=batch, seq=seq, report_state=False
    )
    self.parameters = parameters
    d, f, tokens = self.model.d_model, self.model.d_ff, batch * seq
    self.tokens, self.u, self.a = tokens, 2 * d * tokens, f * tokens
    heads = self.model.num_heads + 2 * self.model.num_kv_heads
    self.qkv = d * heads * self.model.head_width
    experts = self.model.num_experts or 1
    self.gate_up, self.head = experts * 2 * d * f, d * self.model.vocab_size
    self.layer = self.qkv + d * d + self.gate_up + experts * f * d

  def run(self, name, gpus=1, *, tensor=1, **options):
    """Returns a configuration; a GPU's microbatch has the case's batch size."""
    sizes = f"fsdp={gpus}" + (f",tensor={tensor}" if tensor > 1 else "")
    if options.get("optimizer_in_backward"):
      options["optim"] = dataclasses.replace(self.config.optim, clip="share")
    parts = gpus * options.get("accumulate", 1)
    return dataclasses.replace(
      self.config,
      mesh=sizes if gpus > 1 else "",
      batch=self.config.batch * parts,
      **RECIPES[name] | options,
    )

  def kept(self, name):
    """Returns the bytes that one layer saves for all tokens."""
    recipe = self.run(name).coat_recipe()
    return saved_bytes(self.model, recipe) * self.tokens

  def plan(self, name, gpus=1, *, tensor=1, **options):
    """Plans a step on one of `gpus` GPUs."""
    run = self.run(name, gpus, tensor=tensor, **options)
    # Each of two moments has a code per value and, per 128 values, 5 bytes: an
    # f32 amax and a power.
    state = 2 + 10 / 128 if run.recipe == "coat" else 8
    share = self.parameters // gpus
    dtype = run.params.removesuffix("_low8")
    params = jax.ShapeDtypeStruct((share,), dtype)
    optimizer = jax.ShapeDtypeStruct((int(state * share),), "uint8")
    return plan(run, AbstractState(params, optimizer))


LLAMA2_7B = Case("llama2_7b", 6_738_415_616, batch=2, seq=2048)
# The demo models have few weights per token.
DEMO = Case("demo", 803_968, batch=64, seq=256)
DEMO_MOE = Case("demo_moe", 2_626_944, batch=64, seq=256)
