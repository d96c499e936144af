# SPDX-License-Identifier: Apache-2.0
"""Measures a Llama-2-7B layer in PyTorch, in BF16 and with torchao's FP8.

  python -m benchmarks.peers.layer [--batch 4] [--seq 2048]

For each recipe (BF16, torchao's tensorwise and rowwise FP8), the command prints
two JSON rows, `peers.layer`: one for the forward pass, and one for the forward
and backward pass (gradients of weights and input). The data is random, and the
layer is compiled with torch.compile. `saved_bytes` is the memory that the
forward pass leaves allocated, excluding the output. `saved_units` is this
memory divided by the size of the BF16 input. `benchmarks.layer` measures the
same layer in this project.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.timing import attempt, emit, measure

D, F_MLP, HEADS = 4096, 11008, 32
RECIPES = (None, "tensorwise", "rowwise")


class Layer(nn.Module):
  """Llama-2-7B's decoder layer; input and output are [batch, seq, D]."""

  def __init__(self, seq: int):
    super().__init__()
    make = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
    self.qkv = nn.Linear(D, 3 * D, **make)
    self.out = nn.Linear(D, D, **make)
    self.gate_up = nn.Linear(D, 2 * F_MLP, **make)
    self.down = nn.Linear(F_MLP, D, **make)
    norm = {"dtype": torch.bfloat16, "device": "cuda", "eps": 1e-5}
    self.norm1, self.norm2 = nn.RMSNorm(D, **norm), nn.RMSNorm(D, **norm)
    half = D // HEADS // 2
    rates = 1e4 ** (-torch.arange(half, device="cuda") / half)
    angles = torch.outer(torch.arange(seq, device="cuda"), rates)
    angles = torch.cat([angles, angles], -1)
    self.register_buffer("cos", angles.cos().bfloat16())
    self.register_buffer("sin", angles.sin().bfloat16())

  def rotate(self, x):
    a, b = x.chunk(2, -1)
    return x * self.cos + torch.cat([-b, a], -1) * self.sin

  def forward(self, x):
    batch, seq, _ = x.shape
    heads = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, D // HEADS)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(
      self.rotate(q), self.rotate(k), v, is_causal=True
    )
    x = x + self.out(y.transpose(1, 2).reshape(batch, seq, D))
    gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
    return x + self.down(F.silu(gate) * up)


def run(recipe: str | None, batch: int, seq: int) -> None:
  """Measures one recipe and prints its rows."""
  layer = Layer(seq)
  if recipe:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(layer, config=config)
  compiled = torch.compile(layer)
  shape = batch, seq, D
  x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
  x.requires_grad_()
  dy = torch.randn_like(x)
  arguments = [x, *layer.parameters()]

  def full():
    torch.autograd.grad(compiled(x), arguments, dy)

  def forward():
    with torch.no_grad():
      compiled(x)

  full()
  torch.cuda.synchronize()
  before = torch.cuda.memory_allocated()
  y = compiled(x)
  saved = torch.cuda.memory_allocated() - before - y.nbytes
  del y
  case = dict(preset="llama2_7b", batch=batch, seq=seq, param_dtype="bfloat16")
  name = "torch.compile" + (f" torchao float8 {recipe}" if recipe else " bf16")
  emit(
    "peers.layer",
    case | {"mode": "full"},
    name,
    **measure(full),
    saved_bytes=saved,
    saved_units=saved / x.nbytes,
  )
  emit("peers.layer", case | {"mode": "forward"}, name, **measure(forward))


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns 1 if a recipe failed."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.peers.layer",
    description=__doc__.splitlines()[0],
  )
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--seq", type=int, default=2048)
  options = parser.parse_args(arguments)
  done = []
  for recipe in RECIPES:
    torch._dynamo.reset()
    done.append(
      attempt(
        f"layer, {recipe or 'bf16'}",
        lambda recipe=recipe: run(recipe, options.batch, options.seq),
      )
    )
  return int(not all(done))


if __name__ == "__main__":
  sys.exit(main())
