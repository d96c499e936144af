# SPDX-License-Identifier: Apache-2.0
"""Compares this library and transformers on exported models.

  python -m studies.exports OUT DIR [DIR ...]

The study requires torch and transformers. Each DIR is a Hugging Face
checkpoint. `train.pretrain finetune --init-from` trains it for 10 steps with
the `coat` recipe on the default text, and `train.convert export-hf` exports
the result to a subfolder of OUT. Then both `coat_jax.models.load_hf` and
transformers read the exported folder in f32. transformers runs its `eager`
attention, because its default attention may ignore soft caps.

The command prints a JSON row, `exports`, for each folder:

  logits   largest difference between the two libraries' logits, divided by the
           largest magnitude of transformers' logits
  greedy   number of equal tokens before the first difference when both
           libraries generate 16 tokens greedily after a prompt
  moved    largest change of a weight during training
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.harness import emit
from coat_jax import recipes
from coat_jax.models import generate, load_hf
from train import convert, pretrain

NEW_TOKENS = 16


def train_and_export(source: Path, out: Path) -> None:
  """Trains a checkpoint and exports the result to `out`."""
  options = {
    "init-from": source,
    "recipe": "coat",
    "steps": 10,
    "batch": 2,
    "seq": 64,
    "optim.lr": 1e-3,
    "optim.warmup": 1,
    "eval-batches": 1,
  }
  words = [str(x) for pair in options.items() for x in pair]
  words[::2] = [f"--{name}" for name in words[::2]]
  with tempfile.TemporaryDirectory() as folder:
    run = str(Path(folder) / "run")
    if pretrain.main(["finetune", "--out", run, *words]):
      raise RuntimeError(f"training {source} failed")
    if convert.main(["export-hf", run, "--out", str(out)]):
      raise RuntimeError(f"exporting {source} failed")


def theirs(folder: Path, tokens: np.ndarray, prompt: list[int]):
  """Computes logits and greedy tokens after a prompt, with transformers."""
  import torch  # Only this function needs torch.
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  with torch.no_grad():
    logits = model(torch.tensor(tokens)).logits.numpy()
    rows = model.generate(
      torch.tensor([prompt]),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
      eos_token_id=None,
    )
  return logits, rows[0, len(prompt) :].tolist()


def compare(source: Path, exported: Path) -> dict[str, float | int]:
  """Compares both libraries on an exported model; returns a row's values."""
  model = load_hf(exported, recipe=recipes.bf16(), dtype=jnp.float32)
  size = model.config.vocab_size
  tokens = np.random.default_rng(0).integers(3, size, (2, 48))
  prompt = tokens[0, :7].tolist()
  want, greedy = theirs(exported, tokens, prompt)
  found = np.asarray(model.logits(jnp.int32(tokens)))
  ours = generate(model, [prompt], max_new_tokens=NEW_TOKENS, temperature=0.0)
  same = [a == b for a, b in zip(ours.tokens[0], greedy, strict=True)]
  files = (folder / "model.safetensors" for folder in (source, exported))
  before, after = map(load_file, files)
  return dict(
    logits=float(np.abs(found - want).max() / np.abs(want).max()),
    greedy=int(np.argmin([*same, False])),
    moved=max(float(np.abs(after[k] - before[k]).max()) for k in before),
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains, exports and compares each folder."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.exports", description=__doc__.split("\n")[0]
  )
  parser.add_argument("out", type=Path, help="folder for the exported models")
  parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
  given = parser.parse_args(arguments)
  for source in given.folders:
    exported = given.out / source.name
    train_and_export(source, exported)
    emit("exports", dict(model=source.name), **compare(source, exported))


if __name__ == "__main__":
  main()
