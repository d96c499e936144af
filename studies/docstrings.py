# SPDX-License-Identifier: Apache-2.0
"""Builds training data from source code: text, and chats about functions.

  python -m studies.docstrings OUT /usr/lib/python3 [DIR ...]

The study reads all .py files in the folders, or all files with the suffixes
that --suffixes lists, except symbolic links and files above 1 MB. It writes to
the folder OUT:

  tokenizer.json   a byte-level BPE with 32,000 tokens, including ChatML's;
                   tokenizer_config.json names the token that ends a turn
  tokens.bin       the text of all files as uint16 token ids, for pretraining
  chats.jsonl      one conversation per function that has a docstring, unless
                   its source or its docstring has more than 4,000 characters:
                   the user shows the source and asks what it does, and the
                   assistant answers with the docstring
  source.json      the folders, the suffixes, the size of the vocabulary, and
                   the numbers of files, tokens and conversations

Files are shuffled into the same order in every run, and duplicate files are
used only once. Losses are comparable only if they come from the same data, so
record source.json with them.
"""

import argparse
import ast
import hashlib
import json
import random
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import arguments as args
from benchmarks.harness import say

VOCAB_SIZE = 32_000
END = "<|endoftext|>"
_LARGEST_FILE, _LARGEST_FUNCTION = 1_000_000, 4_000


def read_sources(
  folders: Sequence[Path], suffixes: Sequence[str] = (".py",)
) -> list[str]:
  """Reads the files in folders, drops duplicates, and shuffles the texts."""
  found = {}
  for folder in folders:
    for path in sorted(folder.rglob("*")):
      if path.suffix not in suffixes:
        continue
      if path.is_symlink() or not path.is_file():
        continue
      if path.stat().st_size > _LARGEST_FILE:
        continue
      data = path.read_bytes()
      found.setdefault(hashlib.sha256(data).digest(), data)
  texts = [data.decode("utf-8", "replace") for _, data in sorted(found.items())]
  random.Random(0).shuffle(texts)
  return texts


def conversations(text: str) -> Iterator[dict]:
  """Yields a conversation for each function that has a docstring."""
  try:
    tree = ast.parse(text)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return
  lines = text.split("\n")
  for node in ast.walk(tree):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      continue
    docstring, body = ast.get_docstring(node), node.body[1:]
    if not docstring or not docstring.strip() or not body:
      continue
    first, end = node.body[0], node.end_lineno
    head = lines[node.lineno - 1 : first.lineno - 1]
    tail = lines[first.end_lineno : end]
    if not head or not tail:  # The whole function is on one line.
      continue
    indent = " " * first.col_offset
    source = textwrap.dedent("\n".join([*head, f"{indent}...", *tail]))
    if max(len(source), len(docstring)) > _LARGEST_FUNCTION:
      continue
    asked = f"What does {node.name} do?\n\n{source}"
    yield {
      "messages": [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": docstring},
      ]
    }


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE with ChatML's special tokens."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END, "<|im_start|>", "<|im_end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def write(texts: Sequence[str], out: Path, vocab_size: int) -> dict[str, int]:
  """Writes all files but source.json; returns the counts for source.json."""
  # Train on an eighth of the text, which contains nearly all words.
  tokenizer = train_tokenizer(texts[: len(texts) // 8 + 1], vocab_size)
  tokenizer.save(str(out / "tokenizer.json"))
  (out / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im_end|>"}), "utf-8"
  )
  end, tokens, chats = tokenizer.token_to_id(END), 0, 0
  with (
    open(out / "tokens.bin", "wb") as ids,
    open(out / "chats.jsonl", "w", encoding="utf-8") as rows,
  ):
    for i in range(0, len(texts), 1000):
      for encoded in tokenizer.encode_batch(texts[i : i + 1000]):
        ids.write(np.asarray([*encoded.ids, end], np.uint16).tobytes())
        tokens += len(encoded.ids) + 1
    for text in texts:
      for conversation in conversations(text):
        rows.write(json.dumps(conversation) + "\n")
        chats += 1
  return {"files": len(texts), "tokens": tokens, "conversations": chats}


def main(arguments: list[str] | None = None) -> dict[str, int]:
  """Reads the command line and writes the files."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.docstrings",
    description=__doc__.splitlines()[0],
  )
  parser.add_argument("out", type=Path)
  parser.add_argument("folders", type=Path, nargs="+")
  parser.add_argument(
    "--vocab-size",
    type=args.count,
    default=VOCAB_SIZE,
    help="size of the tokenizer's vocabulary",
  )
  parser.add_argument(
    "--suffixes",
    nargs="+",
    default=[".py"],
    metavar="SUFFIX",
    help="suffixes of the files to read (default: .py)",
  )
  options = parser.parse_args(arguments)
  with args.checked(parser):
    if options.vocab_size > 2**16:
      raise ValueError(
        "--vocab-size must be at most 65536, because ids have 16 bits, "
        f"got {options.vocab_size}; pass a smaller size"
      )
    texts = read_sources(options.folders, options.suffixes)
    if not texts:
      raise ValueError(
        f"folders must contain {' or '.join(options.suffixes)} files, got "
        f"none in {', '.join(map(str, options.folders))}; pass other folders"
      )
    options.out.mkdir(parents=True)
    counts = write(texts, options.out, options.vocab_size)
    source = dict(
      folders=list(map(str, options.folders)),
      suffixes=options.suffixes,
      vocab_size=options.vocab_size,
      **counts,
    )
    (options.out / "source.json").write_text(json.dumps(source), "utf-8")
  say(f"{options.out}: " + ", ".join(f"{n} {x}" for x, n in counts.items()))
  return counts


if __name__ == "__main__":
  main()
