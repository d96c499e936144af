# SPDX-License-Identifier: Apache-2.0
"""`python -m train.evaluate` on Hugging Face folders."""

import importlib.metadata
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import coat_jax
from coat_jax import recipes
from coat_jax.models import load_hf
from tests.models.hf.folders import DATA
from tests.train.evaluation.models import oracle
from tests.train.folders import expected, with_tokenizer, words
from train import evaluate
from train.evaluation import report
from train.evaluation.answers import Answers
from train.evaluation.perplexity import Perplexity

ROWS = [row.tolist() for row in expected("llama")["input_ids"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return with_tokenizer(tmp_path_factory.mktemp("hf") / "llama", begin=1)


@pytest.fixture
def data(tmp_path):
  """Writes the golden tokens as words; returns the file."""
  file = tmp_path / "golden.jsonl"
  lines = [json.dumps({"text": words(row)}) for row in ROWS]
  file.write_text("\n".join(lines))
  return file


def command(*line):
  """Evaluates in this process; returns the exit status."""
  try:
    return evaluate.main([str(word) for word in line])
  except SystemExit as exit:  # raised by tyro
    return exit.code


def test_figures_of_texts_are_printed_and_written(
  folder, data, tmp_path, capsys
):
  out = tmp_path / "out.json"
  line = [folder, "--data", data, "--compute", "float32", "--batch", 2]
  assert command(*line, "--out", out) == 0
  printed = capsys.readouterr()
  model = load_hf(DATA / "llama", recipe=recipes.bf16(), dtype="float32")
  score = oracle(model)
  # The tokenizer puts token 1 before each row.
  nats = -sum(score([1], row, 256)[0].sum() for row in ROWS)
  found = json.loads(out.read_text())
  (text,) = found["texts"]
  assert abs(text["nats"] - nats) < 1e-3
  assert text["tokens"] == 96 and text["documents"] == 2
  assert text["documents_are"] == "apart" and text["words"] == 96
  assert text["bytes"] == sum(len(words(row)) for row in ROWS)
  assert math.isclose(text["nats_per_token"], nats / 96, rel_tol=1e-5)
  assert found["arguments"]["data"] == [str(data)]
  assert (found["compute"], found["length"]) == ("float32", 256)
  assert found["versions"]["jax"] == importlib.metadata.version("jax")
  assert found["versions"]["coat_jax"] == coat_jax.__version__
  header, _, row = printed.out.splitlines()
  assert header.startswith("text, documents apart") and "bits/byte" in header
  assert row.split()[1:4] == ["2", "96", f"{nats / 96:.4f}"]
  assert "tokens/s" in printed.err
  # An existing file is not overwritten.
  assert command(*line, "--out", out) == 2
  assert f"--out: {out} must not exist, because nothing is overwritten" in (
    capsys.readouterr().err
  )
  # These options change the figures.
  for options, count in (
    (["--limit", 1], 1),
    (["--documents", "joined", "--length", 64, "--stride", 48], 2),
  ):
    out.unlink()
    assert command(*line, *options, "--out", out) == 0
    (other,) = json.loads(out.read_text())["texts"]
    assert other["documents"] == count and other["tokens"] == 48 * count
    assert other["nats_per_token"] != text["nats_per_token"]


@pytest.mark.slow
def test_figures_in_bfloat16_are_near_those_in_float32(folder, data, tmp_path):
  found = {}
  for compute in ("bfloat16", "float32"):
    out = tmp_path / f"{compute}.json"
    line = [folder, "--data", data, "--compute", compute, "--out", out]
    assert command(*line) == 0
    found[compute] = json.loads(out.read_text())["texts"][0]["nats_per_token"]
  # The figures differ by at most the relative precision of BF16's 8 bits.
  assert found["bfloat16"] != found["float32"]
  assert math.isclose(*found.values(), rel_tol=2**-8)


@pytest.mark.parametrize(
  "options, message",
  [
    ([], "needs a text, a task or conversations"),
    (["--data", "none.txt"], "the path must exist, got none.txt"),
    (["--data", "{data}", "--batch", 0], "batch must be a whole number"),
    (["--data", "{data}", "--limit", 0], "limit must be a whole number"),
    (
      ["--data", "{data}", "--length", 0],
      "length must be a whole number",
    ),
    (["--data", "{data}", "--stride", 999], "stride must be 1 to 256"),
    (["--data", "{data}", "--shots", 1], "--shots needs --task"),
    (["--data", "{data}", "--task-dir", "x"], "--task-dir needs --task"),
    (["--task", "x", "--stride", 1], "--stride needs --data"),
    (["--task", "x", "--documents", "joined"], "--documents needs --data"),
    (
      ["--conversations", "{data}", "--images", "x"],
      "--images applies to vision-language models, got a text-only llama",
    ),
    (["--task", "x", "--shots", -1], "shots must be a whole number from 0"),
    (["--task", "x", "--task-dir", "none"], "--task-dir must be a folder"),
    (
      ["--data", "{data}", "--out", "{data}/x.json"],
      "must be in a folder, got",
    ),
    (["--data", "{data}", "--tokenizer", "none"], "none, which is not a file"),
    (["--data", "{folder}/model.safetensors"], "must be text in UTF-8"),
  ],
)
def test_bad_input_is_refused(folder, data, options, message, capsys):
  options = [str(x).format(data=data, folder=folder) for x in options]
  assert command(folder, *options) == 2
  printed = capsys.readouterr()
  # tyro wraps lines and draws a frame around them.
  shown = " ".join(printed.err.replace("│", " ").split())
  assert message in shown and printed.out == ""
  assert "Traceback" not in printed.err


def test_same_file_for_figures_and_page_is_refused(
  folder, data, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "link").symlink_to(tmp_path)
  line = [folder, "--conversations", data, "--out", "same.html", "--page"]
  for page in ("same.html", tmp_path / "same.html", "link/same.html"):
    assert command(*line, page) == 2
    printed = capsys.readouterr().err
    assert "--out and --page must be different files" in printed
  assert not (tmp_path / "same.html").exists()


def test_tasks_without_the_harness_are_refused(folder, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  assert command(folder, "--task", "arc_easy") == 2
  message = "but the module lm_eval is not installed; run pip install '.[eval]'"
  assert message in capsys.readouterr().err


def test_tables_show_at_most_seven_digits():
  words = [67395.9372, 1.23456789e42, 999.12349, math.inf]
  rows = [
    report.text_row("data", "apart", Perplexity(1, 10, 40, 2, nats), 1.0)
    for nats in (2 * math.log(x) for x in words)
  ]
  lines = report.text_table(rows).splitlines()
  found = [line.split()[-1] for line in lines[2:]]
  assert found == ["67,395.9", "1.23457e+42", "999.1235", "inf"]
  assert max(map(len, lines)) < 100
  answers = Answers(1, 10, 10 * math.log(67395.9372), 0, [])
  header, (row,) = report.answer_figures([("model", answers)])
  assert row[header.index("perplexity")] == "67,395.9"


def test_report_is_valid_json_with_null_for_nan_and_infinity(tmp_path):
  out = tmp_path / "out.json"
  values = {"a": math.inf, "b": [np.float32(0.5), math.nan], "c": Path("x")}
  report.write(out, values | {"d": (1, None, True)})
  found = json.loads(out.read_text(), parse_constant=pytest.fail)
  assert found == {"a": None, "b": [0.5, None], "c": "x", "d": [1, None, True]}
  assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
