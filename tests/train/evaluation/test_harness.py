# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness, which `make test-eval` installs."""

import importlib
import json
import math
import re
from typing import Any

import pytest
import tokenizers

from tests.docs.pages import ROOT
from tests.train.evaluation.models import alphabet_model, oracle, random_model
from tests.train.evaluation.test_scoring import Words
from tests.train.folders import VOCAB_SIZE, with_tokenizer
from train import evaluate
from train.data.text import ByteText
from train.evaluation.tasks import Tasks

lm_eval: Any = pytest.importorskip(
  "lm_eval", reason="the extra eval is not installed; make test-eval does it"
)
from lm_eval.api.instance import Instance  # noqa: E402

from train.evaluation.harness import DecoderLM  # noqa: E402

TASKS = ROOT / "tests" / "data" / "tasks"
NAMES = ("alphabet_choice", "alphabet_text", "alphabet_generation")
LENGTH = 48
TOLERANCE = 1e-4  # As in test_scoring.


@pytest.fixture(scope="module", autouse=True)
def data_of_tasks_here(tmp_path_factory):
  """Keeps the harness's data out of the user's cache."""
  config: Any = importlib.import_module("datasets").config
  with pytest.MonkeyPatch.context() as patch:
    where = tmp_path_factory.mktemp("datasets")
    patch.setattr(config, "HF_DATASETS_CACHE", where)
    yield


@pytest.fixture(scope="module")
def model():
  return random_model()


@pytest.fixture(scope="module")
def score(model):
  return oracle(model)


def asked(kind, *arguments):
  return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


# Maps the texts of a request to the texts that the model reads and scores.
LONG = "the quick brown fox jumps over the lazy dog and runs"
PAIRS = {
  ("the fox", " jumps"): ("the fox", " jumps"),
  ("", "over the"): ("\n", "over the"),
  # Spaces at the end of a context belong to the continuation.
  ("the lazy  ", "dog"): ("the lazy", "  dog"),
  # If a request is too long, the context loses its beginning.
  (LONG, " away"): (LONG[8:], " away"),
}


def test_loglikelihoods_match_each_row_alone(model, score):
  want = {
    pair: score(context.encode(), then.encode(), LENGTH)
    for pair, (context, then) in PAIRS.items()
  }
  order = list(PAIRS)
  for batch in (2, 3):
    lm = DecoderLM(model, ByteText(), length=LENGTH, batch=batch)
    order = order[::-1]
    found = lm.loglikelihood(asked("loglikelihood", *order))
    for pair, (total, is_greedy) in zip(order, found, strict=True):
      assert abs(total - want[pair][0].sum()) < TOLERANCE
      assert is_greedy == want[pair][1]


def test_long_text_is_scored_in_windows_after_one_prefix_token(model, score):
  text = "abcdefghij" * 10
  lm = DecoderLM(model, Words(), length=LENGTH, batch=2)
  requests = asked("loglikelihood_rolling", (text,), ("xy",), ("",))
  found = lm.loglikelihood_rolling(requests)
  row = [7, *text.encode()]
  ends = (1, 49, 97, 101)
  total = sum(
    score(row[max(0, end - 49) : start], row[start:end], LENGTH)[0].sum()
    for start, end in zip(ends, ends[1:], strict=False)
  )
  assert abs(found[0] - total) < TOLERANCE
  assert abs(found[1] - score([7], b"xy", LENGTH)[0].sum()) < TOLERANCE
  assert found[2] == 0


def test_generation_ends_at_stop_strings_or_at_its_length():
  lm = DecoderLM(alphabet_model(), ByteText(), length=LENGTH, batch=3)
  until = {"until": ["\n"], "max_gen_toks": 8}
  options = [
    ("abc", until, "defghijk"),
    ("w", until, "xyz"),
    ("a", {"until": "hij", "max_new_tokens": 20}, "bcdefg"),
    # An empty context becomes a line end.
    ("", {"until": ["", "d"], "max_gen_toks": 8}, "abc"),
    # By default, half of the context length is generated.
    ("a", {}, "bcdefghijklmnopqrstuvwxy"),
    # A context that is too long loses its beginning.
    ("x" * 99 + "a", {"until": [], "max_gen_toks": 2}, "bc"),
    ("abc", until | {"do_sample": True, "temperature": 0.01}, "defghijk"),
    ("abc", until | {"do_sample": True, "top_k": 1}, "defghijk"),
    ("abc", until | {"do_sample": False, "temperature": 9.0}, "defghijk"),
  ]
  for order in (options, options[::-1]):
    found = lm.generate_until(
      asked("generate_until", *((text, kind) for text, kind, _ in order))
    )
    assert found == [added for *_, added in order]


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_beams": 4}, "a task may only set until, .* got num_beams; leave"),
    ({"max_gen_toks": LENGTH}, "max_gen_toks must be below 48, the number"),
  ],
)
def test_unsupported_generation_options_are_refused(model, options, message):
  lm = DecoderLM(model, ByteText(), length=LENGTH)
  with pytest.raises(ValueError, match=message):
    lm.generate_until(asked("generate_until", ("a", options)))


def test_tasks_of_each_kind_give_the_expected_scores():
  model = alphabet_model()
  score = oracle(model)
  lm = DecoderLM(model, ByteText(), length=LENGTH, batch=3)
  found = Tasks(NAMES, TASKS).run(lm)["results"]
  choice, text, generation = (found[name] for name in NAMES)
  # One of four answers is wrong on purpose.
  assert choice["acc,none"] == choice["acc_norm,none"] == 0.75
  assert generation["exact_match,none"] == 0.75
  lines = (TASKS / "alphabet_text.jsonl").read_text().splitlines()
  texts = [json.loads(line)["text"] for line in lines]
  # The model uses only the last token, so windows change no score.
  total = sum(score([10], x.encode(), 999)[0].sum() for x in texts)
  size = sum(len(x.encode()) for x in texts)
  words = sum(len(re.split(r"\s+", x)) for x in texts)
  bits = -total / size / math.log(2)
  assert math.isclose(text["bits_per_byte,none"], bits, rel_tol=1e-5)
  per_word = math.exp(-total / words)
  assert math.isclose(text["word_perplexity,none"], per_word, rel_tol=1e-4)
  limited = Tasks(NAMES[:1], TASKS).run(lm, limit=3, shots=1)
  assert limited["n-samples"][NAMES[0]]["effective"] == 3
  assert limited["n-shot"][NAMES[0]] == 1


def test_command_prints_and_writes_the_results_of_tasks(tmp_path, capsys):
  folder = with_tokenizer(tmp_path / "hf")
  letters = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({chr(i): i for i in range(VOCAB_SIZE)}, "?")
  )
  each = tokenizers.Regex(r"[\s\S]")
  letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, "isolated")
  letters.save(str(folder / "tokenizer.json"))
  out = tmp_path / "out.json"
  line = [str(folder), "--task", NAMES[0], "--task-dir", str(TASKS)]
  line += ["--task", NAMES[2], "--out", str(out), "--compute", "float32"]
  assert evaluate.main(line) == 0
  printed = capsys.readouterr()
  rows = json.loads(out.read_text())["tasks"]
  names = [(row["task"], row["metric"]) for row in rows]
  assert names == [
    (NAMES[0], "acc"),
    (NAMES[0], "acc_norm"),
    (NAMES[2], "exact_match"),
  ]
  for row in rows:
    assert 0 <= row["value"] <= 1 and row["stderr"] >= 0
    assert row["examples"] == 4 and row["shots"] == 0
  table = printed.out.splitlines()
  assert table[0].split() == (
    ["task", "metric", "filter", "examples", "shots", "value", "stderr"]
  )
  assert [x.split()[0] for x in table[2:]] == [name for name, _ in names]
  assert json.loads(out.read_text())["versions"]["lm_eval"]


def test_unavailable_tasks_are_refused(tmp_path, monkeypatch):
  # Replace the harness's thousands of tasks with an empty folder.
  (tmp_path / "own").mkdir()
  file = str(tmp_path / "own" / "manager.py")
  monkeypatch.setattr(lm_eval.tasks.manager, "__file__", file)
  with pytest.raises(
    ValueError, match="got alphabet_choise; did you mean alph"
  ):
    Tasks(["alphabet_choice", "alphabet_choise"], TASKS)
  # The data of this task do not exist, and nothing is downloaded.
  task = (TASKS / "alphabet_text.yaml").read_text()
  other = task.replace("dataset_path: json", "dataset_path: no/such")
  (tmp_path / "other.yaml").write_text(other)
  with pytest.raises(ValueError, match="a task could not be loaded offline"):
    Tasks(["alphabet_text"], tmp_path)
