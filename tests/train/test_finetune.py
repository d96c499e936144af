# SPDX-License-Identifier: Apache-2.0
"""`python -m train.finetune`: from a checkpoint to an exported model."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from coat_jax import recipes
from coat_jax.models import load_hf
from tests.models.hf.folders import copied
from tests.train.chats import (
  CHAT,
  conversation,
  make_checkpoint,
  write_conversations,
)
from tests.train.runs import contents, losses, programs_on_disk
from train import convert, finetune, generate, pretrain, pretrained
from train.config import resume_rule
from train.conversations import load
from train.finetune_config import ChatData, FinetuneConfig
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

OPTIONS = {
  "batch": 8,
  "seq": 96,
  "steps": 8,
  "eval-every": 4,
  "save-every": 4,
  "held-out": 0.3,
  "sample-tokens": 8,
  "recipe": "bf16",
  "compute": "float32",
  "optim.codec": "float32",
  "optim.lr": 3e-3,
  # No gradient norm reaches this limit, so nothing is clipped.
  "optim.grad-clip": 1e9,
}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return write_conversations(tmp_path_factory.mktemp("data") / "sums.jsonl")


def line(checkpoint, data, out, *flags, **others):
  others = {name.replace("__", "."): x for name, x in others.items()}
  others = {name.replace("_", "-"): x for name, x in others.items()}
  words = [str(checkpoint), "--data", str(data), "--out", str(out), *flags]
  for name, x in (OPTIONS | others).items():
    words += [] if x is None else [f"--{name}", str(x)]
  return words


def run(*arguments, **options):
  """Fine-tunes in this process; returns the exit status."""
  try:
    return finetune.main(line(*arguments, **options))
  except SystemExit as exit:  # raised by tyro
    return exit.code


@pytest.fixture(scope="module")
def finished(checkpoint, data, tmp_path_factory):
  """Returns the folder of a finished run; tests do not change it."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(checkpoint, data, out) == 0
  return out


def source_of(checkpoint, data):
  config = FinetuneConfig(
    init_from=str(checkpoint),
    data=ChatData(files=(str(data),), held_out=0.3),
    out="unused",
    seq=96,
    batch=8,
    model=load_hf(checkpoint).config,
  )
  return load(config)


def held_out_loss(model, documents, numbers):
  """Returns nats per target, summing one document at a time in NumPy."""
  logits = jax.jit(lambda model, tokens: model.logits(tokens))
  nats, count = 0.0, 0
  for number in numbers:
    start, end = documents.starts[number : number + 2]
    tokens, mask = documents.tokens[start:end], documents.mask[start:end]
    padded = np.pad(tokens, (0, 97 - len(tokens)))[None, :-1]
    found = np.asarray(logits(model, padded))[0, : len(tokens) - 1]
    found = found.astype(np.float64)
    own = found[np.arange(len(found)), tokens[1:]]
    each = np.log(np.sum(np.exp(found), axis=-1)) - own
    nats += np.sum(each * mask[1:])
    count += np.sum(mask[1:])
  return nats / count


@pytest.mark.slow
def test_run_learns_and_its_export_has_the_logged_held_out_loss(
  finished, checkpoint, data, tmp_path
):
  rows = list(read_metrics(finished / "metrics.jsonl"))
  found = {r["step"]: r["held_out_loss"] for r in rows if "held_out_loss" in r}
  assert found.keys() == {4, 8} and found[8] < found[4] - 0.1
  out = tmp_path / "out"
  command = ["export-hf", str(finished), "--out", str(out)]
  assert convert.main(command) == 0
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
  _, source = source_of(checkpoint, data)
  numbers = [i for row in source.held_out.members for i in row]
  assert len(numbers) == 18 and len(source.held_out) > 8
  documents = source.rows.documents
  model = load_hf(out, recipe=recipes.bf16(), dtype="float32")
  exact = held_out_loss(model, documents, numbers)
  assert found[8] == pytest.approx(exact, abs=1e-5)


def test_log_counts_targets_and_padding(finished, checkpoint, data):
  rows = [r for r in read_metrics(finished / "metrics.jsonl") if "loss" in r]
  config, source = source_of(checkpoint, data)
  batches = source.train_batches(config, process_index=0, process_count=1)
  for row in rows:
    batch = next(batches)
    assert row["targets"] == batch["is_target"].sum() > 0
    padding = np.mean(batch["segments"][:, :-1] == 0)
    assert row["padding"] == pytest.approx(padding, abs=1e-4)
    speed = row["tokens_per_s"] * (1 - row["padding"])
    assert row["unpadded_tokens_per_s"] == pytest.approx(speed, rel=1e-3)
  assert len(rows) == 8


def test_samples_are_answers_to_held_out_prompts(finished, checkpoint, data):
  rows = list(read_metrics(RunDirectory(finished).samples))
  assert [(r["step"], r["sample"]) for r in rows] == [
    *[(4, 0), (4, 1), (8, 0), (8, 1)]
  ]
  told = json.dumps([conversation(i) for i in range(60)])
  for row in rows:
    question = row["prompt"].split("user\n\n")[-1].split("?")[0]
    assert f"{question}?" in told and row["reference"] in told
    assert row["answer"] != row["prompt"]
  assert len({row["prompt"] for row in rows}) == 2


@pytest.mark.slow
def test_chat_with_a_finished_run_prints_only_the_answer(finished, capsys):
  words = [str(finished), "--prompt", "What is 5 and 2?", "--chat"]
  assert generate.main([*words, "--max-tokens", "4", "--temperature", "0"]) == 0
  output, errors = capsys.readouterr()
  assert "What is" not in output and "weights of step 8" in errors


def test_interrupted_run_resumes_bit_for_bit(
  finished, checkpoint, data, tmp_path, capsys
):
  out = tmp_path / "copy"
  shutil.copytree(finished, out)
  before, samples = losses(out), RunDirectory(out).samples.read_bytes()
  shutil.rmtree(out / "checkpoints" / "8")  # As if killed before step 8.
  # A resumed run does not need the checkpoint that it began with.
  assert run(checkpoint / "gone", data, out, "--resume") == 0
  assert "resumed at step 4" in capsys.readouterr().err
  assert losses(out) == before
  assert RunDirectory(out).samples.read_bytes() == samples
  assert pretrain.main(["demo", "--out", str(out), "--resume"]) == 2
  assert "was written by train.finetune" in capsys.readouterr().err


def test_resume_with_another_seq_names_both_values(
  finished, checkpoint, data, capsys
):
  # Longer sequences also change the data and leave too few rows for a batch,
  # but the error names only the option.
  before = contents(finished)
  assert run(checkpoint, data, finished, "--resume", seq=None) == 2
  errors = capsys.readouterr().err
  assert "other options (saved -> given): " in errors
  assert "seq: 96 -> 2048; pass the options with which" in errors
  assert "fingerprint" not in errors and "at least" not in errors
  assert contents(finished) == before


def test_epochs_determine_the_number_of_steps(checkpoint, data):
  config, source = source_of(checkpoint, data)
  assert config.steps == -(-3 * len(source.rows) // 8) > 3


@pytest.mark.parametrize(
  "flags, options, words",
  [
    ([], dict(data="broken.jsonl"), "broken.jsonl line 2: "),
    (
      [],
      dict(data="none.jsonl"),
      "found no files of conversations at",
    ),
    ([], dict(optim__warmup=20), "warmup must fit into 8 steps"),
    (["--distributed"], dict(mesh="fsdp=8"), "pass --samples 0"),
    (["--data=more.jsonl"], {}, "--data was given several times"),
    ([], dict(batch=4096), "must have at least 4096 rows"),
  ],
)
def test_bad_input_is_reported_and_nothing_is_written(
  flags, options, words, checkpoint, data, tmp_path, monkeypatch, capsys
):
  (tmp_path / "broken.jsonl").write_text(data.read_text()[:300] + "\n")
  file = tmp_path / options.pop("data", data)
  out = tmp_path / "run"
  assert run(checkpoint, file, out, *flags, **options) == 2
  errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
  assert words in errors and "Traceback" not in errors
  assert not out.exists()


def test_run_keeps_the_token_that_ends_turns(checkpoint, data, tmp_path):
  """Uses the checkpoint's template; its config.json names only token 2."""
  config, source = source_of(checkpoint, data)
  run = RunDirectory(tmp_path)
  run.source.mkdir()
  shutil.copytree(checkpoint, run.source, dirs_exist_ok=True)
  source.keep_files(run)
  file = run.source / "generation_config.json"
  end = tokenizers.Tokenizer.from_file(f"{CHAT}/tokenizer.json")
  end = end.token_to_id("<|eot_id|>")
  assert json.loads(file.read_text()) == {"eos_token_id": [2, end]}


def test_checkpoint_without_a_tokenizer_is_refused(data, tmp_path, capsys):
  folder, out = copied(tmp_path / "bare"), tmp_path / "run"
  assert run(folder, data, out) == 2
  assert "tokenizer" in capsys.readouterr().err
  assert not out.exists()


def test_vision_tower_alone_is_refused(data, tmp_path, capsys):
  out = tmp_path / "run"
  assert run("tests/data/hf/vit", data, out) == 2
  errors = " ".join(capsys.readouterr().err.split())
  assert "a text model or a LLaVA model, got a vision tower (vit)" in errors
  assert "python -m train.vit" in errors and "VisionTower" not in errors
  assert not out.exists()


def test_sequences_beyond_the_positions_of_a_checkpoint_are_reported(
  checkpoint, data, tmp_path, monkeypatch, capsys
):
  def stop(*_):
    raise ValueError("enough")

  monkeypatch.setattr(pretrained, "initial_state", stop)
  longest = json.loads((checkpoint / "config.json").read_text())
  longest, words = longest["max_position_embeddings"], "warning: sequences of"
  rows = json.loads(data.read_text().splitlines()[0])
  rows["messages"] *= 50
  long = tmp_path / "long.jsonl"
  long.write_text(40 * (json.dumps(rows) + "\n"))
  for seq, is_said in ((longest, False), (longest + 1, True)):
    assert run(checkpoint, long, tmp_path / "run", seq=seq) == 2
    errors = capsys.readouterr().err
    assert "enough" in errors and (words in errors) == is_said
  assert f"than the max_position_embeddings of {longest}" in errors


@pytest.mark.slow
def test_bad_rows_are_counted_and_a_known_template_is_kept(
  checkpoint, data, tmp_path, capsys
):
  file, out = tmp_path / "some.jsonl", tmp_path / "run"
  file.write_text(data.read_text() + '{"messages": []}\nnot JSON\n')
  flags = ["--skip-bad", "--template", "chatml", "--no-packing"]
  options = dict(steps=1, samples=0, sample_tokens=None)
  assert run(checkpoint, file, out, *flags, **options) == 0
  errors = capsys.readouterr().err
  assert "62 rows; bad rows left out: 2" in errors
  assert not RunDirectory(out).samples.exists()
  target = tmp_path / "exported"
  assert convert.main(["export-hf", str(out), "--out", str(target)]) == 0
  assert "<|im_start|>" in (target / "chat_template.jinja").read_text()
  before = contents(out)
  assert run(checkpoint, file, out, *flags, **options) == 2
  assert contents(out) == before


@pytest.mark.slow
@pytest.mark.parametrize(
  "flags, options",
  [
    (
      ["--optimizer-in-backward", "--compare", "bf16"],
      {"optim.clip": "share", "params": "bfloat16", "mesh": "fsdp=8"},
    ),
    (
      [],
      {"accumulate": 2, "mesh": "data=2,fsdp=2,tensor=2", "samples": 1},
    ),
  ],
)
def test_fp8_run_learns_as_f32_does(
  flags, options, finished, checkpoint, data, tmp_path, capsys
):
  out = tmp_path / "run"
  fp8 = {
    "recipe": "coat",
    "compute": "bfloat16",
    "optim.codec": "coat",
    "optim.group-size": 16,
  }
  assert run(checkpoint, data, out, *flags, **fp8 | options) == 0
  found, exact = losses(out), losses(finished)
  for step in (4, 8):
    key = step, "held_out_loss"
    assert found[key] == pytest.approx(exact[key], abs=0.05)
  samples = list(read_metrics(RunDirectory(out).samples))
  assert len(samples) == 2 * options.get("samples", 2)
  if "--compare" in flags:
    table = capsys.readouterr().out
    assert "held-out loss" in table and "tokens/s" in table
    (twin,) = RunDirectory(out).twins()
    own = losses(twin.path)[8, "held_out_loss"]
    assert own == pytest.approx(exact[8, "held_out_loss"], abs=0.02)


@pytest.mark.parametrize(
  "name, rule",
  [
    ("data.held_out", "fixed"),
    ("data.packing", "fixed"),
    ("data.files", "silent"),
    ("model.d_ff", "fixed"),
    ("steps", "reported"),
    ("samples", "silent"),
  ],
)
def test_options_have_the_expected_resume_rules(name, rule):
  assert resume_rule(name, FinetuneConfig) == rule
