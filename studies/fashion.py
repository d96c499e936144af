# SPDX-License-Identifier: Apache-2.0
"""Trains on Fashion-MNIST's pictures of clothes, in BF16 and in FP8.

  python -m studies.fashion images IDX FOLDER
  python -m studies.fashion vit FOLDER [--seeds 0 1]
  python -m studies.fashion llava FOLDER [--seeds 0 1]

`images` reads the four files of Fashion-MNIST (arXiv:1708.07747) from the
folder IDX; Debian's package dataset-fashion-mnist installs them in
/usr/share/datasets/fashion-mnist. It writes the 60,000 training images and
10,000 test images to FOLDER/images/{train,test}/CLASS/*.png. It also writes
conversations that ask for the classes of these images:

  one.json   one image per conversation, from the first half of the training set
  two.json   two images per conversation, from the second half
  test.json  two test images per conversation

`vit` trains a vision transformer of 4.8 M parameters for ten epochs, and
measures the loss and the accuracy on the test images.

`llava` trains a LLaVA of 31 M parameters in three stages:

  all        trains all parts on one.json in BF16, which stands in for
             pretraining; then a random projector replaces the trained one
  projector  trains only the projector, on two.json
  decoder    trains the projector and the decoder, on two.json

Each stage measures the loss on held-out conversations. At the end,
`train.evaluate` counts the exact answers to the conversations in test.json.

Every run appends a row to FOLDER/rows.jsonl. Runs of `vit` with the same seed
start from the same weights and read the same data. All runs of `llava` start
from the same weights; the seed sets the order of the conversations, and which
conversations are held out. Do not run two processes in one folder before
FOLDER/start is complete.
"""

import argparse
import gzip
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from PIL import Image

from benchmarks.harness import emit
from coat_jax import recipes
from coat_jax.models import (
  ModelConfig,
  Projector,
  VisionConfig,
  VisionLanguageConfig,
  load_hf,
  save_hf,
)
from studies import shapes
from train import convert, evaluate, finetune, vit

CLASSES = (
  "a t-shirt",
  "trousers",
  "a pullover",
  "a dress",
  "a coat",
  "a sandal",
  "a shirt",
  "a sneaker",
  "a bag",
  "an ankle boot",
)
RECIPES = {"bf16": "float32", "coat": "coat"}  # Each recipe's codec.
BATCH = {"vit": 256, "llava": 64}
STEPS = 2350  # Ten epochs of the vision transformer.
_PARTS = {"train": "train", "test": "t10k"}
_SIDE = 28
_VISION = VisionConfig(
  family="clip_vision",
  num_layers=6,
  d_model=256,
  d_ff=1024,
  num_heads=4,
  image_size=_SIDE,
  patch_size=4,
  norm_eps=1e-5,
)
LLAVA = VisionLanguageConfig(
  text=ModelConfig(
    family="llama",
    num_layers=8,
    d_model=512,
    d_ff=1408,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=64,
  ),
  vision=_VISION,
  image_token=0,
)
# For each stage of a LLaVA: the conversations, the parts to train, the learning
# rate and the number of epochs.
STAGES = {
  "all": ("one.json", "all", 5e-4, 4),
  "projector": ("two.json", "projector", 1e-3, 2),
  "decoder": ("two.json", "decoder", 3e-4, 2),
}


def read_idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
  """Reads images, uint8 [N, 28, 28], and classes, uint8 [N]."""
  images = _array(folder / f"{part}-images-idx3-ubyte")
  labels = _array(folder / f"{part}-labels-idx1-ubyte")
  return images, labels


def _array(path: Path) -> np.ndarray:
  """Reads a file in the IDX format, which may be compressed with gzip."""
  packed = path.with_name(path.name + ".gz")
  data = gzip.decompress(packed.read_bytes()) if packed.exists() else None
  data = path.read_bytes() if data is None else data
  dims = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
  return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(dims)


def write_images(idx: Path, folder: Path) -> None:
  """Writes the images, and the conversations about them."""
  names = {part: _write_part(idx, folder, part) for part in _PARTS}
  draw = random.Random(0)
  draw.shuffle(names["train"])
  half = len(names["train"]) // 2
  for name, found, each in (
    ("one", names["train"][:half], 1),
    ("two", names["train"][half:], 2),
    ("test", names["test"], 2),
  ):
    groups = [found[i : i + each] for i in range(0, len(found), each)]
    text = json.dumps([_conversation(group) for group in groups])
    (folder / f"{name}.json").write_text(text)


def _write_part(idx: Path, folder: Path, part: str) -> list[tuple[str, str]]:
  """Writes "train" or "test" images; returns their file names and classes."""
  found = []
  for i, (pixels, label) in enumerate(
    zip(*read_idx(idx, _PARTS[part]), strict=True)
  ):
    said = CLASSES[label]
    file = Path(part, said.split(maxsplit=1)[-1].replace(" ", "_"), f"{i}.png")
    path = folder / "images" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, compress_level=1)
    found.append((str(file), said))
  return found


def _conversation(group: Sequence[tuple[str, str]]) -> dict[str, Any]:
  seen = " ".join(["<image>"] * len(group))
  asked = "What is it ?" if len(group) == 1 else "What are they ?"
  told = " and ".join(said for _, said in group) + " ."
  return {
    "image": [name for name, _ in group],
    "conversations": shapes.said(f"{seen} {asked}", told),
  }


def train_vit(folder: Path, recipe: str, seed: int) -> dict[str, Any]:
  """Trains an image classifier; returns its loss and accuracy."""
  out = folder / f"vit_{recipe}_{seed}"
  shape = {
    f"model.{name.replace('_', '-')}": getattr(_VISION, name)
    for name in ("num_layers", "d_model", "d_ff", "num_heads")
  }
  options = {
    "data": folder / "images",
    "out": out,
    "model.image-size": _SIDE,
    "model.patch-size": _VISION.patch_size,
    "recipe": recipe,
    "optim.codec": RECIPES[recipe],
    "optim.lr": 1e-3,
    "seed": seed,
    "batch": BATCH["vit"],
    "steps": STEPS,
    "eval-every": STEPS,
    "eval-batches": 40,
    "save-every": STEPS,
  }
  shapes.call(vit.main, ["vit_digits"], {**shape, **options})
  keys = "held_out_loss", "held_out_accuracy"
  return {key: shapes.last(out, key) for key in keys}


def train_stage(
  folder: Path, start: Path, stage: str, recipe: str, seed: int
) -> Path:
  """Trains a stage of a LLaVA from `start`; returns the folder of the run."""
  rows, trained, rate, epochs = STAGES[stage]
  out = folder / f"{stage}_{recipe}_{seed}"
  options = {
    "data": folder / rows,
    "images": folder / "images",
    "out": out,
    "trained": trained,
    "recipe": recipe,
    "optim.codec": RECIPES[recipe],
    "optim.lr": rate,
    "seed": seed,
    "epochs": epochs,
    "seq": 128,
    "batch": BATCH["llava"],
    "samples": 0,
    "eval-every": 10_000,
    "save-every": 10_000,
  }
  shapes.call(finetune.main, [start], options)
  return out


def with_new_projector(run_folder: Path, out: Path) -> Path:
  """Writes a run's LLaVA with a random projector, as a Hugging Face folder."""
  trained = out.with_name(f"{out.name}_trained")
  shapes.call(convert.main, ["export-hf", run_folder], {"out": trained})
  model = load_hf(trained, recipe=recipes.bf16())
  model.projector = Projector(model.config, rngs=nnx.Rngs(0))  # pyright: ignore
  save_hf(model, out, like=trained)
  return out


def start_of(folder: Path) -> Path:
  """Returns the folder of the initial LLaVA, which is trained if missing."""
  if not (start := folder / "start").exists():
    words = [*" ".join(CLASSES).split(), *shapes.WORDS]
    shapes.make_llava(folder / "random", LLAVA, words)
    trained = train_stage(folder, folder / "random", "all", "bf16", 0)
    with_new_projector(trained, start)
  return start


def train_llava(folder: Path, recipe: str, seed: int) -> dict[str, Any]:
  """Trains both stages of a LLaVA; returns their losses and test results."""
  start = start_of(folder)
  projector = train_stage(folder, start, "projector", recipe, seed)
  decoder = train_stage(folder, projector, "decoder", recipe, seed)
  report = folder / f"answers_{recipe}_{seed}.json"
  options = {
    "conversations": folder / "test.json",
    "images": folder / "images",
    "max-tokens": 12,
    "batch": 250,
    "out": report,
  }
  shapes.call(evaluate.main, [decoder], options)
  found = json.loads(report.read_text())["conversations"][0]
  return {
    "projector_loss": shapes.last(projector),
    "decoder_loss": shapes.last(decoder),
    **{key: found[key] for key in ("nats_per_token", "exact_match")},
  }


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes the images, or trains and appends a row per run."""
  parser = argparse.ArgumentParser(prog="python -m studies.fashion")
  commands = parser.add_subparsers(dest="command", required=True)
  images = commands.add_parser("images")
  images.add_argument("idx", type=Path)
  images.add_argument("folder", type=Path)
  trained = {"vit": train_vit, "llava": train_llava}
  for name in trained:
    command = commands.add_parser(name)
    command.add_argument("folder", type=Path)
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
  options = parser.parse_args(arguments)
  if options.command == "images":
    return write_images(options.idx, options.folder)
  for seed in options.seeds:
    for recipe in RECIPES:
      values = trained[options.command](options.folder, recipe, seed)
      case = {"model": options.command, "recipe": recipe, "seed": seed}
      row = emit("fashion", case, **values)
      with (options.folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
  return None


if __name__ == "__main__":
  main()
