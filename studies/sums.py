# SPDX-License-Identifier: Apache-2.0
"""Compares how many answers are right after training in FP8 and in BF16.

  python -m studies.sums OUT [--steps 600] [--seeds 0 1 2]

For each seed, a Llama of 0.45 million parameters with random weights learns to
add two numbers from 0 to 19. Conversations ask for each sum in four wordings. A
random quarter of these 1,600 questions is held out, so the model has usually
seen the sum of a held-out question in another wording. All `VARIANTS` start
from the same weights and read the same data. `train.evaluate` scores the greedy
answers of each variant, and a row is added to OUT/rows.jsonl. Training one
variant for 600 steps takes about a minute on two CPU cores.
"""

import argparse
import json
import random
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks import arguments as args
from coat_jax import recipes
from coat_jax.models import Decoder, ModelConfig, save_hf
from train import evaluate, finetune

QUESTIONS = ("{} + {}?", "What is {} plus {}?", "Add {} to {}.", "{} and {}?")
# Recipe and codec of each variant.
VARIANTS = {
  "bf16": ("bf16", "float32"),
  "moments": ("bf16", "coat"),
  "layers": ("coat", "float32"),
  "coat": ("coat", "coat"),
}
CONFIG = ModelConfig(
  family="llama",
  num_layers=2,
  d_model=128,
  d_ff=352,
  num_heads=4,
  num_kv_heads=2,
  vocab_size=320,
)


def write_checkpoint(folder: Path, seed: int) -> None:
  """Writes a model with random weights and a byte-level tokenizer."""
  save_hf(Decoder(CONFIG, recipes.coat(), rngs=nnx.Rngs(seed)), folder)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  tokenizer.save(str(folder / "tokenizer.json"))
  text = json.dumps({"eos_token": "<|im_end|>"})
  (folder / "tokenizer_config.json").write_text(text)


def write_conversations(folder: Path) -> None:
  """Writes train.jsonl and test.jsonl."""
  rows = [
    {
      "messages": [
        {"role": "user", "content": question.format(a, b)},
        {"role": "assistant", "content": f"It is {a + b}."},
      ]
    }
    for question in QUESTIONS
    for a in range(20)
    for b in range(20)
  ]
  random.Random(0).shuffle(rows)
  for name, part in (("test", rows[:400]), ("train", rows[400:])):
    lines = "".join(json.dumps(row) + "\n" for row in part)
    (folder / f"{name}.jsonl").write_text(lines)


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m studies.sums")
  parser.add_argument("out", type=Path)
  parser.add_argument("--steps", type=args.count, default=600)
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  options = parser.parse_args()
  options.out.mkdir(parents=True)
  write_conversations(options.out)
  for seed in options.seeds:
    write_checkpoint(options.out / f"start_{seed}", seed)
    for variant in VARIANTS:
      row = train_one(options.out, variant, seed, options.steps)
      with (options.out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def train_one(folder: Path, variant: str, seed: int, steps: int) -> dict:
  """Trains and evaluates a variant; returns its row."""
  recipe, codec = VARIANTS[variant]
  tuned = folder / f"{variant}_{seed}"
  report = folder / f"{variant}_{seed}.json"
  # fmt: off
  training = [
    folder / f"start_{seed}",
    "--data", folder / "train.jsonl", "--template", "chatml",
    "--recipe", recipe, "--optim.codec", codec, "--seed", seed,
    "--steps", steps, "--batch", 8, "--seq", 256, "--optim.lr", 3e-3,
    "--eval-every", steps, "--out", tuned,
  ]
  evaluation = [
    tuned, "--conversations", folder / "test.jsonl",
    "--max-tokens", 16, "--batch", 50, "--out", report,
  ]
  # fmt: on
  for program, options in ((finetune, training), (evaluate, evaluation)):
    if program.main([*map(str, options)]):
      raise SystemExit(1)  # The program has already printed the error.
  found = json.loads(report.read_text())["conversations"][0]
  keys = "nats_per_token", "questions", "exact_match"
  case = {"variant": variant, "seed": seed, "steps": steps}
  return {"bench": "sums", "case": case} | {key: found[key] for key in keys}


if __name__ == "__main__":
  main()
