# SPDX-License-Identifier: Apache-2.0
"""`python -m train.evaluate --conversations`: answers with and without images.

The oracle runs the model on each conversation alone, without a cache.
"""

import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from PIL import Image

from coat_jax import recipes
from coat_jax.models import load_hf
from tests.comparing import jit
from tests.models.hf.folders import DATA, copied, tensors_of
from tests.train.evaluation.models import oracle
from train import evaluate
from train.data.chat.documents import Counts, Documents
from train.data.text import Text
from train.evaluation import answers

IMAGE = 383
HEAD = "language_model.lm_head.weight"
TEMPLATE = (
  "{% for m in messages %}{% if m.role == 'user' %}t7 {{ m.content }} "
  "{% else %}t8 {{ m.content }} </s> {% endif %}{% endfor %}"
  "{% if add_generation_prompt %}t8 {% endif %}"
)


def with_words(folder):
  """Adds a tokenizer of words and image settings to a checkpoint."""
  names = {2: "</s>", IMAGE: "<image>"}
  vocab = {names.get(i, f"t{i}"): i for i in range(IMAGE + 1)}
  model = tokenizers.models.WordLevel(vocab, unk_token="t0")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(list(names.values()))
  tokenizer.save(str(folder / "tokenizer.json"))
  for name, found in {
    "tokenizer_config.json": {"eos_token": "</s>", "chat_template": TEMPLATE},
    "preprocessor_config.json": {
      "size": {"height": 28, "width": 28},
      "image_mean": [0.5] * 3,
      "image_std": [0.5] * 3,
    },
  }.items():
    (folder / name).write_text(json.dumps(found))
  return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return with_words(copied(tmp_path_factory.mktemp("hf") / "llava", "llava"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  """Makes a folder of noise images, in the size of the model's inputs."""
  folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
  for name in ("a.png", "b.png"):
    pixels = rng.integers(0, 256, (28, 28, 3), np.uint8)
    Image.fromarray(pixels).save(folder / name)
  return folder


def said(*texts):
  roles = ("human", "gpt") * len(texts)
  return [
    {"from": x, "value": text} for x, text in zip(roles, texts, strict=False)
  ]


def rows(first):
  """Makes three conversations; the first one's answer is `first`."""
  return [
    {"image": "a.png", "conversations": said("<image> t20 t21", first)},
    {"conversations": said("t22 t23 t24", "t9 " * 7)},
    {
      "image": ["b.png", "a.png"],
      "conversations": said("<image> t25", "t30 t31", "t26 <image>", "t32"),
    },
  ]


def command(*line):
  """Evaluates in this process; returns the exit status."""
  try:
    return evaluate.main([str(word) for word in line])
  except SystemExit as exit:  # raised by tyro
    return exit.code


@pytest.fixture(scope="module")
def logprobs(images):
  """Returns a function (tokens, image names) -> log-probabilities [T, V]."""
  model = load_hf(
    DATA / "llava",
    recipe=recipes.bf16(),
    dtype=jnp.float32,
  )
  graph, params = nnx.split(model)
  run = jit(lambda params, *x: nnx.merge(graph, params).logits(*x))

  def call(tokens, names):
    pixels = np.zeros((1, 2, 3, 28, 28), np.float32)
    for place, name in zip(pixels[0], names, strict=False):
      read = np.asarray(Image.open(images / name), np.float32)
      place[:] = (read / 255 * 2 - 1).transpose(2, 0, 1)
    # Pad to one size; no token attends to the padding after it.
    padded = np.pad(np.int32(tokens), (0, 40 - len(tokens)))[None]
    logits = np.asarray(run(params, padded, pixels), np.float64)[0]
    logits = logits[: len(tokens)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  return call


@pytest.mark.slow
def test_answers_and_their_loss_match_the_model(
  folder, images, logprobs, tmp_path, capsys
):
  each = [IMAGE] * 4
  asked = [7, *each, 20, 21, 8]
  best = int(logprobs(asked, ["a.png"])[-1].argmax())
  data, out, page = (tmp_path / x for x in ("rows.json", "out.json", "a.html"))
  data.write_text(json.dumps(rows(f"t{best}")))
  other = copied(
    tmp_path / "other",
    "llava",
    tensors={HEAD: -tensors_of(DATA / "llava")[HEAD]},
  )
  line = [folder, "--conversations", data, "--images", images]
  line += ["--compute", "float32", "--batch", 2, "--max-tokens", 1]
  line += ["--out", out, "--page", page, "--beside", with_words(other)]
  assert command(*line) == 0
  found, beside = json.loads(out.read_text())["conversations"]
  # For each conversation: tokens, positions of targets, and images.
  whole = [
    ([*asked, best, 2], [8, 9], ["a.png"]),
    ([7, 22, 23, 24, 8, *[9] * 7, 2], range(5, 13), []),
    (
      [7, *each, 25, 8, 30, 31, 2, 7, 26, *each, 8, 32, 2],
      [7, 8, 9, 17, 18],
      ["b.png", "a.png"],
    ),
  ]
  nats, firsts = 0.0, []
  for tokens, learned, names in whole:
    known = logprobs(tokens, names)
    nats -= sum(known[i - 1, tokens[i]] for i in learned)
    starts = [i for i in learned if i - 1 not in learned]
    firsts += [int(known[i - 1].argmax()) for i in starts]
  assert found["tokens"] == 15 and abs(found["nats"] - nats) < 1e-3
  assert math.isclose(found["nats_per_token"], nats / 15, rel_tol=1e-4)
  assert [x["answer"] for x in found["answers"]] == [f"t{x}" for x in firsts]
  assert [x["reference"] for x in found["answers"]] == [
    *(f"t{best}", " ".join(["t9"] * 7), "t30 t31", "t32")
  ]
  assert [x["question"] for x in found["answers"]] == [
    *("t7 t20 t21 t8", "t7 t22 t23 t24 t8", "t7 t25 t8", "t7 t26 t8")
  ]
  assert [[x[-5:] for x in y["images"]] for y in found["answers"]] == [
    *(["a.png"], [], ["b.png"], ["b.png", "a.png"])
  ]
  assert [x["is_short"] for x in found["answers"]] == [True, False, True, True]
  assert found["exact_match"] == 1 / 3 and found["short_answers"] == 3
  # The other model answers with the least probable tokens.
  assert beside["nats"] > found["nats"] and beside["exact_match"] == 0
  assert beside["model"] == str(other)
  written = page.read_text()
  assert written.count("data:image/jpeg;base64,") == 3
  assert f'<td dir="auto">t{best}<span' in written
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].startswith("model") and "33.3%" in printed[2]
  # --limit keeps the first two conversations, which fit into --length.
  out.unlink()
  line = [folder, "--conversations", data, "--images", images, "--limit", 2]
  line += ["--compute", "float32", "--batch", 2, "--max-tokens", 12]
  assert command(*line, "--length", 20, "--out", out) == 0
  (few,) = json.loads(out.read_text())["conversations"]
  assert few["conversations"] == 2 and few["tokens"] == 10
  assert (few["questions"], few["left_out"]) == (2, 0)


@pytest.mark.parametrize(
  "options, message",
  [
    (["--images", "x"], "--images needs --conversations"),
    (["--page", "x"], "--page needs --conversations"),
    (["--skip-bad"], "--skip-bad needs --conversations"),
    (["--conversations", "none.json"], "found no files of conversations"),
    (
      ["--conversations", "{data}", "--max-tokens", 0],
      "max_tokens must be a whole number at least 1",
    ),
    (
      ["--conversations", "{data}", "--page", "{data}/x.html"],
      "must be in a folder, got the file",
    ),
    (
      ["--conversations", "{data}"],
      "the folder that image names are relative to",
    ),
    (
      ["--conversations", "{data}", "--beside", "none"],
      "none: expected a Hugging Face",
    ),
  ],
)
def test_bad_input_is_refused(folder, tmp_path, options, message, capsys):
  data = tmp_path / "rows.json"
  data.write_text(json.dumps(rows("t9")))
  options = [str(x).format(data=data) for x in options]
  if options[:1] != ["--conversations"]:
    options += ["--data", str(data)]
  assert command(folder, *options) == 2
  shown = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
  assert message in shown and "Traceback" not in shown


def test_bad_rows_are_skipped_if_asked(folder, tmp_path, capsys):
  data = tmp_path / "rows.json"
  data.write_text(json.dumps(rows("t9")))  # Without its images.
  line = [folder, "--conversations", data, "--max-tokens", 1]
  assert command(*line) == 2
  assert "(on a command line --skip-bad)" in capsys.readouterr().err
  assert command(*line, "--skip-bad") == 0
  errors = capsys.readouterr().err
  left_out = f"2 (2 missing image, first at {data} line 1)"
  assert f"{folder}: 3 rows; bad rows left out: {left_out}" in errors
  assert "1 answers in" in errors


class Letters(Text):
  """Encodes letters as tokens; # ends a turn but is not a stop token."""

  stop_tokens = (0,)

  def encode(self, text):
    return [*text.encode()]

  def decode(self, tokens):
    return bytes(tokens).decode().replace("#", "")


def test_answer_ends_at_the_token_that_ends_turns_in_the_data(monkeypatch):
  def generate(model, prompts, *, max_new_tokens, stop_tokens, **others):
    found = []
    for prompt in prompts:
      # Continue the alphabet, end the turn, then write on.
      said = [*range(prompt[-1] + 1, ord("z")), *b"#and so on"]
      ends = [i for i, token in enumerate(said) if token in stop_tokens]
      found.append(said[: (ends or [max_new_tokens])[0]])
    return types.SimpleNamespace(tokens=found)

  monkeypatch.setattr(answers, "generate", generate)
  monkeypatch.setattr(answers, "_score", lambda *_: (1, 0.0))
  # The last answer does not end with #.
  turns = [("u", "vwxy#"), ("w", "xy#"), ("v", "wx")]
  tokens = np.frombuffer("".join(q + a for q, a in turns).encode(), np.uint8)
  starts = np.cumsum([0, *(len(q + a) for q, a in turns)])
  mask = np.ones(len(tokens), bool)
  mask[starts[:-1]] = False
  documents = Documents(tokens.astype(np.int32), mask, starts, Counts())
  found = answers.ask(
    None, Letters(), documents, length=99, max_tokens=20, batch=2
  )
  assert [x.answer for x in found.answers] == ["vwxy", "xy", "wxy"]
  assert found.exact_match == 2 / 3


@pytest.mark.slow
def test_text_only_model_is_evaluated(tmp_path):
  folder = with_words(copied(tmp_path / "llama", "llama"))
  data, out = tmp_path / "rows.json", tmp_path / "out.json"
  data.write_text(json.dumps(rows("t9")[1:2]))
  line = [folder, "--conversations", data, "--compute", "float32"]
  assert command(*line, "--max-tokens", 3, "--out", out) == 0
  (found,) = json.loads(out.read_text())["conversations"]
  model = load_hf(DATA / "llama", recipe=recipes.bf16(), dtype=jnp.float32)
  logprobs, _ = oracle(model)([7, 22, 23, 24, 8], [*[9] * 7, 2], 256)
  assert found["tokens"] == 8 and abs(found["nats"] + logprobs.sum()) < 1e-3
  assert (found["questions"], found["exact_match"]) == (1, None)
