# SPDX-License-Identifier: Apache-2.0
"""Compares exact matches of answers after fine-tuning in FP8 and in BF16.

  python -m studies.sums OUT [SEED ...]

For each SEED (by default 0, 1 and 2), a Llama of 0.4 million parameters with
random weights learns to add two numbers up to 19, which four wordings ask for.
A quarter of the 1,600 questions are held out, chosen at random, so a held-out
sum was usually seen in another wording. The model is trained once in BF16 with
f32 moments and once in recipe coat, from the same weights and on the same data.
`train.evaluate` scores its greedy answers. Each run adds a row to
OUT/rows.jsonl, and takes about a minute on two CPU cores.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coat_jax import recipes
from coat_jax.models import Decoder, ModelConfig, save_hf

QUESTIONS = ("{} + {}?", "What is {} plus {}?", "Add {} to {}.", "{} and {}?")
STEPS, BATCH, LENGTH = 600, 8, 256
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


def run(module: str, *arguments) -> None:
  subprocess.run(
    [sys.executable, "-m", module, *map(str, arguments)], check=True
  )


def main() -> None:
  out, *seeds = sys.argv[1:]
  folder = Path(out)
  folder.mkdir(parents=True)
  write_conversations(folder)
  for seed in map(int, seeds or "012"):
    start = folder / f"start_{seed}"
    write_checkpoint(start, seed)
    for recipe, codec in (("bf16", "float32"), ("coat", "coat")):
      tuned, report = (
        folder / f"{recipe}_{seed}",
        folder / f"{recipe}_{seed}.json",
      )
      # fmt: off
      run("train.finetune", start, "--data", folder / "train.jsonl",
          "--template", "chatml", "--recipe", recipe, "--optim.codec", codec,
          "--seed", seed, "--steps", STEPS, "--batch", BATCH, "--seq", LENGTH,
          "--optim.lr", 3e-3, "--eval-every", STEPS, "--out", tuned)
      run("train.evaluate", tuned, "--conversations", folder / "test.jsonl",
          "--max-tokens", 16, "--batch", 50, "--out", report)
      # fmt: on
      found = json.loads(report.read_text())["conversations"][0]
      keys = "nats_per_token", "questions", "exact_match"
      case = {"variant": recipe, "seed": seed, "steps": STEPS}
      row = {"bench": "sums", "case": case} | {key: found[key] for key in keys}
      with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main()
