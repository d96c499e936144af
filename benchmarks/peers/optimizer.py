# SPDX-License-Identifier: Apache-2.0
"""Measures the AdamW step of several PyTorch libraries on one large tensor.

  python -m benchmarks.peers.optimizer [--rows 16384] [--columns 16384]

The optimizers store their moments in the weights' dtype or in 8 bits. Weights
and gradients have the same dtype: f32 or BF16. The command prints a JSON row,
`peers.optimizer`, for each optimizer and dtype. A row contains the milliseconds
that `step()` takes, and `state_bytes`, the bytes of optimizer state per weight.
`benchmarks.optimizer` measures the same step in this project.
"""

import argparse
import sys
from collections.abc import Callable

import torch

from benchmarks.peers.timing import attempt, emit, measure

RATE = dict(lr=1e-3, weight_decay=0.1)


def torch_fused(params, dtype):
  return torch.optim.AdamW(params, fused=True, **RATE)


def torchao_fp8(params, dtype):
  from torchao.optim import AdamWFp8

  return AdamWFp8(params, bf16_stochastic_round=dtype == torch.bfloat16, **RATE)


def torchao_8bit(params, dtype):
  from torchao.optim import AdamW8bit

  return AdamW8bit(
    params, bf16_stochastic_round=dtype == torch.bfloat16, **RATE
  )


def bitsandbytes_8bit(params, dtype):
  import bitsandbytes

  return bitsandbytes.optim.AdamW8bit(params, **RATE)


def flashoptim(params, dtype):
  import flashoptim as library

  return library.FlashAdamW(params, master_weight_bits=None, **RATE)


def flashoptim_24(params, dtype):
  import flashoptim as library

  if dtype == torch.float32:
    return None  # f32 weights already have more than 24 bits.
  return library.FlashAdamW(params, master_weight_bits=24, **RATE)


PEERS: dict[str, Callable] = {
  "torch fused": torch_fused,
  "torchao AdamWFp8": torchao_fp8,
  "torchao AdamW8bit": torchao_8bit,
  "bitsandbytes AdamW8bit": bitsandbytes_8bit,
  "FlashAdamW": flashoptim,
  "FlashAdamW, 24-bit weights": flashoptim_24,
}


def run(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
  """Measures one optimizer and prints its row, if it supports the dtype."""
  before = torch.cuda.memory_allocated()
  weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device="cuda"))
  # Gradients vary in magnitude, as they do in training.
  size = 1e-3 * torch.randn(shape, device="cuda").exp_()
  weight.grad = size.mul_(torch.randn(shape, device="cuda")).to(dtype)
  del size
  own = weight.nbytes + weight.grad.nbytes
  optimizer = PEERS[name]([weight], dtype)
  if optimizer is None:
    return
  optimizer.step()
  torch.cuda.synchronize()
  torch.cuda.empty_cache()
  state = torch.cuda.memory_allocated() - before - own
  case = dict(dtype=str(dtype).removeprefix("torch."), shape=shape)
  emit(
    "peers.optimizer",
    case,
    name,
    **measure(optimizer.step),
    state_bytes=state / weight.numel(),
  )


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns 1 if an optimizer failed."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.peers.optimizer",
    description=__doc__.splitlines()[0],
  )
  parser.add_argument("--rows", type=int, default=1 << 14)
  parser.add_argument("--columns", type=int, default=1 << 14)
  options = parser.parse_args(arguments)
  shape = options.rows, options.columns
  done = [
    attempt(
      f"{name}, {dtype}",
      lambda name=name, dtype=dtype: run(name, dtype, shape),
    )
    for name in PEERS
    for dtype in (torch.float32, torch.bfloat16)
  ]
  return int(not all(done))


if __name__ == "__main__":
  sys.exit(main())
