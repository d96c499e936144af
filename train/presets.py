# SPDX-License-Identifier: Apache-2.0
"""Defines presets: functions that return published settings or demo settings.

The papers used many devices: lower `--batch` and `--steps` if you have few.
"""

import dataclasses
from typing import Any

from train.config import ModelConfig, OptimConfig, TrainConfig

_OLMO: dict[str, Any] = dict(family="olmo", vocab_size=50304)


def demo() -> TrainConfig:
  """A model small enough to train in a minute or two on two CPU cores.

  The warmup is long and the learning rate is low, so that runs can be compared.
  With a rate of 3e-3 and 20 steps of warmup, changing eps from 1e-8 to 0.9e-8
  would change the final loss of a BF16 run by 0.09.
  """
  model = _llama(4, 128, 352, 4, num_kv_heads=2, vocab_size=256)
  optim = OptimConfig(lr=1e-3, warmup=0.5)
  return _run(
    "demo",
    model,
    optim,
    steps=200,
    batch=4,
    seq=256,
    compare_seeds=2,
    eval_every=50,
    save_every=50,
    report_state=True,
  )


def demo_gpu() -> TrainConfig:
  """A demo for a GPU: wide enough for FP8 to pay off, done in a few minutes.

  Its layers have the width of a model with 1.3 billion parameters. It
  trains on less than half of Python's standard library, and needs 17 GB of
  memory in BF16.
  """
  model = _llama(8, 2048, 5504, 16, vocab_size=256)
  optim = OptimConfig(lr=3e-4, warmup=0.25)
  return _run(
    "demo_gpu",
    model,
    optim,
    steps=600,
    batch=4,
    seq=2048,
    compare_seeds=2,
    eval_every=100,
    save_every=600,
  )


def demo_moe() -> TrainConfig:
  """The demo with a mixture of 8 experts; each token is sent to 2 of them."""
  model = dataclasses.replace(
    demo().model,
    family="qwen3_moe",
    d_ff=192,
    num_experts=8,
    experts_per_token=2,
    normalize_experts=True,
    auxiliary_loss=0.01,
  )
  return dataclasses.replace(demo(), out="runs/demo_moe", model=model)


def llama_60m() -> TrainConfig:
  """Shape and number of tokens from the GaLore paper: arXiv:2403.03507."""
  model = _llama(8, 512, 1376, 8, norm_eps=1e-6)
  optim = OptimConfig(lr=1e-3, warmup=0.1)
  return _run("llama_60m", model, optim, steps=10_000, batch=128, seq=1024)


def llama_130m() -> TrainConfig:
  """Shape and number of tokens from the GaLore paper: arXiv:2403.03507."""
  model = _llama(12, 768, 2048, 12, norm_eps=1e-6)
  optim = OptimConfig(lr=1e-3, warmup=0.1)
  return _run("llama_130m", model, optim, steps=20_000, batch=128, seq=1024)


def olmo_1b() -> TrainConfig:
  """OLMo 1B: arXiv:2402.00838; 2 trillion tokens."""
  model = _llama(16, 2048, 8192, 16, **_OLMO, tied_embeddings=True)
  optim = OptimConfig(lr=4e-4, eps=1e-5, min_lr_ratio=0.1)
  return _run("olmo_1b", model, optim, steps=477_000, batch=2048, seq=2048)


def olmo_7b() -> TrainConfig:
  """OLMo 7B: arXiv:2402.00838; 2.46 trillion tokens."""
  model = _llama(32, 4096, 11008, 32, **_OLMO)
  optim = OptimConfig(
    lr=3e-4, eps=1e-5, schedule="linear", warmup=5000, min_lr_ratio=0.1
  )
  return _run("olmo_7b", model, optim, steps=556_000, batch=2160, seq=2048)


def gpt2() -> TrainConfig:
  """The smallest GPT-2, trained like GPT-3 small: arXiv:2005.14165, table 2.1.

  300 billion tokens. The vocabulary of 50257 is rounded up to 50304, so that
  devices can split it evenly. There is no dropout.
  """
  model = _llama(
    *(12, 768, 3072, 12),
    family="gpt2",
    vocab_size=50304,
    tied_embeddings=True,
    max_positions=1024,
  )
  optim = OptimConfig(lr=6e-4, warmup=715, min_lr_ratio=0.1)
  return _run("gpt2", model, optim, steps=572_000, batch=512, seq=1024)


def llama2_7b() -> TrainConfig:
  """arXiv:2307.09288, section 2; 2 trillion tokens in batches of 4 million."""
  model = _llama(32, 4096, 11008, 32)
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run("llama2_7b", model, optim, steps=477_000, batch=1024, seq=4096)


def finetune() -> TrainConfig:
  """Fine-tuning with --init-from: arXiv:2307.09288, section 3.1. Set --steps.

  The checkpoint's shape replaces the default shape, which is llama2_7b's.
  """
  model = _llama(32, 4096, 11008, 32)
  optim = OptimConfig(lr=2e-5, warmup=0.03)
  return _run("finetune", model, optim, steps=1000, batch=64, seq=4096)


def llama2_13b() -> TrainConfig:
  """arXiv:2307.09288, section 2; 2 trillion tokens in batches of 4 million."""
  model = _llama(40, 5120, 13824, 40)
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run("llama2_13b", model, optim, steps=477_000, batch=1024, seq=4096)


def llama_30b() -> TrainConfig:
  """LLaMA 33B: arXiv:2302.13971, table 2; 1.4 trillion tokens."""
  model = _llama(60, 6656, 17920, 52, norm_eps=1e-6)
  optim = OptimConfig(lr=1.5e-4, min_lr_ratio=0.1)
  return _run("llama_30b", model, optim, steps=334_000, batch=2048, seq=2048)


def llama3_8b() -> TrainConfig:
  """arXiv:2407.21783, table 3; 15 trillion tokens; the batch size is fixed."""
  model = _llama(
    32, 4096, 14336, 32, num_kv_heads=8, vocab_size=128256, rope_theta=5e5
  )
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run("llama3_8b", model, optim, steps=3_576_000, batch=512, seq=8192)


def gemma2_2b() -> TrainConfig:
  """arXiv:2408.00118, table 1; 2 trillion tokens.

  The batch size and learning rate are not published; we use llama2_7b's.
  """
  model = _gemma2(26, 2304, 9216, 8)
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run("gemma2_2b", model, optim, steps=477_000, batch=512, seq=8192)


def gemma2_9b() -> TrainConfig:
  """arXiv:2408.00118, table 1; 8 trillion tokens. Otherwise like gemma2_2b."""
  model = _gemma2(42, 3584, 14336, 16)
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run("gemma2_9b", model, optim, steps=1_907_000, batch=512, seq=8192)


def qwen3_30b_a3b() -> TrainConfig:
  """arXiv:2505.09388, table 2; 30 trillion tokens in sequences of 4096.

  The batch size and learning rate are not published; we use llama3_8b's.
  """
  model = _llama(
    *(48, 2048, 768, 32),
    family="qwen3_moe",
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    num_experts=128,
    experts_per_token=8,
    normalize_experts=True,
    auxiliary_loss=0.001,
  )
  optim = OptimConfig(lr=3e-4, min_lr_ratio=0.1)
  return _run(
    "qwen3_30b_a3b", model, optim, steps=7_153_000, batch=1024, seq=4096
  )


def _run(
  name: str, model: ModelConfig, optim: OptimConfig, **options: Any
) -> TrainConfig:
  return TrainConfig(out=f"runs/{name}", model=model, optim=optim, **options)


def _llama(
  layers: int, d_model: int, d_ff: int, heads: int, **others: Any
) -> ModelConfig:
  """Builds the shape of a Llama, or of the family that `others` names."""
  usual: dict[str, Any] = dict(
    family="llama", num_kv_heads=heads, vocab_size=32000
  )
  return ModelConfig(
    num_layers=layers,
    d_model=d_model,
    d_ff=d_ff,
    num_heads=heads,
    **usual | others,
  )


def _gemma2(layers: int, d_model: int, d_ff: int, heads: int) -> ModelConfig:
  return _llama(
    *(layers, d_model, d_ff, heads),
    family="gemma2",
    num_kv_heads=heads // 2,
    vocab_size=256000,
    norm_eps=1e-6,
    tied_embeddings=True,
    head_dim=256,
    window=4096,
    full_every=2,
    attention_soft_cap=50.0,
    logits_soft_cap=30.0,
  )


PRESETS = {
  preset.__name__: preset
  for preset in (
    demo,
    demo_gpu,
    demo_moe,
    llama_60m,
    llama_130m,
    olmo_1b,
    olmo_7b,
    gpt2,
    llama2_7b,
    finetune,
    llama2_13b,
    llama_30b,
    llama3_8b,
    gemma2_2b,
    gemma2_9b,
    qwen3_30b_a3b,
  )
}
