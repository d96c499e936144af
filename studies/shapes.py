# SPDX-License-Identifier: Apache-2.0
"""Trains a small LLaVA on pictures of colored shapes, in BF16 and in FP8.

  python -m studies.shapes FOLDER [--seeds 2]

The study writes a LLaVA with random weights (`llava`) and two files of
conversations to FOLDER. In `words.json`, words describe the pictures;
`shapes.json` contains the pictures themselves, up to two per conversation. The
study trains the LLaVA in three stages:

  words      trains all parameters on words.json
  projector  trains only the projector, on shapes.json
  decoder    trains the projector and the decoder, on shapes.json

The first stage runs once, with the `bf16` recipe. Each of the other stages runs
with `bf16` and `coat` and with several seeds, and starts from the previous
stage's run. At the end, the study prints a table of held-out losses, and of the
differences between the recipes. It takes a few minutes on two CPU cores.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from flax import nnx
from PIL import Image, ImageDraw

from coat_jax import recipes
from coat_jax.models import (
  ModelConfig,
  VisionConfig,
  VisionLanguageConfig,
  VisionLanguageModel,
  save_hf,
)
from train import finetune
from train.run.metrics import format_table, read_metrics

COLORS = {
  "red": (220, 30, 30),
  "green": (30, 180, 60),
  "blue": (40, 60, 230),
  "yellow": (240, 220, 40),
}
KINDS = ("circle", "square", "triangle")
PLACES = ("left", "right", "top", "bottom")
NUMBERS = "zero one two three four five six seven eight nine ten".split()
_ASKED = "user assistant system What is it ? are they a the on and . plus which"
WORDS = (*COLORS, *KINDS, *PLACES, *NUMBERS, *_ASKED.split())
_SPECIAL = ("<image>", "<|im_start|>", "<|im_end|>")
_SIDE = 32
# For each stage: the conversations, the parts to train, the learning rate and
# the number of epochs.
STAGES = {
  "words": ("words.json", "all", 3e-3, 12),
  "projector": ("shapes.json", "projector", 3e-3, 4),
  "decoder": ("shapes.json", "decoder", 1e-3, 4),
}
CONFIG = VisionLanguageConfig(
  text=ModelConfig(
    family="llama",
    num_layers=2,
    d_model=128,
    d_ff=352,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
  ),
  vision=VisionConfig(
    family="clip_vision",
    num_layers=2,
    d_model=64,
    d_ff=128,
    num_heads=4,
    image_size=_SIDE,
    patch_size=8,
    norm_eps=1e-5,
  ),
  image_token=0,
)
_TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' + "
  "message.content + ' <|im_end|> ' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def make_llava(
  folder: Path,
  config: VisionLanguageConfig = CONFIG,
  words: Iterable[str] = WORDS,
) -> None:
  """Writes a LLaVA with random weights as a Hugging Face folder.

  `config.image_token` must be 0, which is the id of `<image>` in the tokenizer.
  """
  model = VisionLanguageModel(config, recipes.bf16(), rngs=nnx.Rngs(0))
  save_hf(model, folder)
  write_files(folder, config, words)


def write_files(
  folder: Path, config: VisionLanguageConfig, words: Iterable[str] = WORDS
) -> None:
  """Writes a LLaVA's tokenizer, chat template and image preprocessing."""
  known = dict.fromkeys([*_SPECIAL, *words])
  vocabulary = {word: i for i, word in enumerate(known)}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocabulary, unk_token="?")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens([*_SPECIAL])
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "chat_template.jinja").write_text(_TEMPLATE)
  size = config.vision.image_size
  for name, values in {
    "tokenizer_config": {"eos_token": "<|im_end|>"},
    "preprocessor_config": {
      "image_processor_type": "CLIPImageProcessor",
      "size": {"shortest_edge": size},
      "crop_size": {"height": size, "width": size},
      "image_mean": [0.5, 0.5, 0.5],
      "image_std": [0.5, 0.5, 0.5],
    },
  }.items():
    (folder / f"{name}.json").write_text(json.dumps(values))


def make_rows(folder: Path, count: int, seed: int = 0) -> None:
  """Writes words.json, shapes.json (`count` conversations each) and the images.

  In both files, every fourth conversation asks for a sum and has no picture.
  """
  draw = random.Random(seed)
  (folder / "images").mkdir(parents=True)
  words, shapes = [], []
  for i in range(count):
    if i % 4 == 3:
      a, b = draw.randrange(6), draw.randrange(5)
      asked = f"What is {NUMBERS[a]} plus {NUMBERS[b]} ?"
      told = f"it is {NUMBERS[a + b]} ."
      words.append({"conversations": said(asked, told)})
      shapes.append(words[-1])
      continue
    names, found = [], []
    for k in range(1 + i % 2):
      thing = [draw.choice(x) for x in ([*COLORS], KINDS, PLACES)]
      found.append(thing)
      names.append(f"{i}_{k}.png")
      _picture(*thing, draw).save(folder / "images" / names[-1])
    told = " and ".join(f"a {c} {kind} on the {p}" for c, kind, p in found)
    asked = "What are they ?" if len(found) > 1 else "What is it ?"
    described = " ".join(" ".join(thing) for thing in found)
    words.append({"conversations": said(f"{described} {asked}", f"{told} .")})
    seen = " ".join(["<image>"] * len(found))
    row = {"conversations": said(f"{seen} {asked}", f"{told} .")}
    shapes.append({"image": names if len(found) > 1 else names[0], **row})
  (folder / "words.json").write_text(json.dumps(words))
  (folder / "shapes.json").write_text(json.dumps(shapes))


def said(asked: str, told: str) -> list[dict[str, str]]:
  return [{"from": "human", "value": asked}, {"from": "gpt", "value": told}]


def _picture(color, kind, place, draw: random.Random) -> Image.Image:
  image = Image.new("RGB", (_SIDE, _SIDE), (draw.randrange(60),) * 3)
  x, y = draw.randrange(12, 20), draw.randrange(12, 20)
  x = {"left": 9, "right": _SIDE - 9}.get(place, x)
  y = {"top": 9, "bottom": _SIDE - 9}.get(place, y)
  r = draw.randrange(5, 8)
  box, pen = (x - r, y - r, x + r, y + r), ImageDraw.Draw(image)
  if kind == "circle":
    pen.ellipse(box, fill=COLORS[color])
  elif kind == "square":
    pen.rectangle(box, fill=COLORS[color])
  else:
    corners = [(x, y - r), (x - r, y + r), (x + r, y + r)]
    pen.polygon(corners, fill=COLORS[color])
  return image


def train(
  folder: Path, start: Path, stage: str, recipe: str, seed: int
) -> Path:
  """Trains a stage, starting from `start`; returns the folder of the run."""
  rows, trained, rate, epochs = STAGES[stage]
  out = folder / f"{stage}_{recipe}_{seed}"
  options: dict[str, Any] = {
    "data": folder / rows,
    "images": folder / "images",
    "out": out,
    "trained": trained,
    "recipe": recipe,
    "seed": seed,
    "epochs": epochs,
    "optim.lr": rate,
    "seq": 96,
    "batch": 16,
    "samples": 0,
    "eval-every": 10_000,
    "held-out": 0.1,
  }
  if recipe == "coat":
    options |= {"optim.codec": "coat", "optim.group-size": 64}
  else:
    options["optim.codec"] = "float32"
  call(finetune.main, [start], options)
  return out


def call(program: Callable, words: Sequence[Any], options: dict) -> None:
  """Calls a program of `train`; exits if it fails."""
  for name, value in options.items():
    words = [*words, f"--{name}", value]
  if status := program([str(word) for word in words]):
    raise SystemExit(status)  # The program has already printed the error.


def last(run: Path, key: str = "held_out_loss") -> float:
  """Reads a metric from a run's last evaluation."""
  return [x[key] for x in read_metrics(run / "metrics.jsonl") if key in x][-1]


def main() -> None:
  """Writes the data, trains, and prints the table."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("folder", type=Path)
  parser.add_argument("--seeds", type=int, default=2)
  folder, seeds = vars(parser.parse_args()).values()
  make_rows(folder, 800)
  make_llava(folder / "llava")
  start = train(folder, folder / "llava", "words", "bf16", 0)
  rows = [["words", f"{last(start):.4f}", "", ""]]
  for seed in range(seeds):
    runs = {"bf16": start, "coat": start}
    for stage in ("projector", "decoder"):
      for recipe, before in runs.items():
        runs[recipe] = train(folder, before, stage, recipe, seed)
      plain, coat = (last(run) for run in runs.values())
      cells = f"{plain:.4f}", f"{coat:.4f}", f"{coat - plain:+.4f}"
      rows.append([f"{stage}, seed {seed}", *cells])
  print(format_table(["held-out loss", "bf16", "coat", "difference"], rows))


if __name__ == "__main__":
  main()
