# SPDX-License-Identifier: Apache-2.0
"""Models that commands read from runs and from Hugging Face folders."""

import pytest

from tests.train.folders import (
  expected,
  with_tokenizer,
  words,
  write_json,
)
from train import convert, generate
from train.data.text import FolderText
from train.source import open_source

F32 = ["--compute", "float32", "--temperature", 0]


def command(*line):
  """Generates in this process; returns the exit status."""
  return generate.main([str(word) for word in line])


@pytest.mark.parametrize(
  "name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_folder_generates_the_same_text_as_transformers(name, tmp_path, capsys):
  greedy = expected(name)["greedy"][0].tolist()
  # The tokenizer prepends greedy[0] to each text, as its begin token.
  folder = with_tokenizer(tmp_path / "hf", name, begin=greedy[0])
  line = [folder, *F32, "--max-tokens", 16]
  assert command(*line, "--prompt", words(greedy[1:8])) == 0
  printed = capsys.readouterr()
  assert printed.out == words(greedy[1:]) + "\n"
  assert "prompts: 8 tokens" in printed.err
  # Generation stops at the end token that the files name.
  write_json(folder / "generation_config.json", eos_token_id=greedy[10])
  template = "{{ messages[0].content }}"
  (folder / "chat_template.jinja").write_text(template)
  # In a chat, only the template decides which token comes first.
  chat = ["--prompt", words(greedy[:8]), "--chat"]
  assert command(*line, *chat) == 0
  printed = capsys.readouterr()
  assert printed.out == words(greedy[8:11]) + "\n"
  assert "prompts: 8 tokens" in printed.err


@pytest.mark.slow
def test_imported_run_generates_like_its_folder(tmp_path, capsys):
  greedy = expected("llama")["greedy"][0].tolist()
  folder = with_tokenizer(tmp_path / "hf", begin=greedy[0])
  run = tmp_path / "run"
  options = ["--recipe", "coat", "--seq", "32", "--batch", "2"]
  line = ["import-hf", str(folder), "--out", str(run), *options]
  assert convert.main(line) == 0
  capsys.readouterr()
  line = [*F32, "--max-tokens", 16, "--prompt", words(greedy[1:8])]
  assert command(run, *line) == 0
  assert capsys.readouterr().out == words(greedy[1:]) + "\n"
  source = open_source(run)
  assert isinstance(source.text, FolderText) and source.length == 32
  assert source.compute == "bfloat16" and source.name.endswith("step 0")


def test_folder_is_described_before_its_weights_are_read(tmp_path):
  folder = with_tokenizer(tmp_path / "x")
  source = open_source(folder)
  assert (source.length, source.compute) == (256, "bfloat16")
  assert source.config.family == "llama" and source.name == str(folder)
  assert open_source(folder, compute="float32").compute == "float32"
  without = with_tokenizer(tmp_path / "y", max_position_embeddings=...)
  assert open_source(without).length == 2048


def test_unreadable_folder_is_refused(tmp_path, capsys):
  folder = with_tokenizer(tmp_path / "x", max_position_embeddings=8)
  line = ["--prompt", words(range(5)), "--max-tokens", 4]

  def check(message, folder=folder, *more):
    assert command(folder, *line, *more) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert "Traceback" not in printed.err

  check("must fit into the 8 tokens that the model was trained to see, got 5")
  (folder / "model.safetensors").write_bytes(b"")
  check("trained to see, got 5")  # Weights are read last.
  (folder / "tokenizer.json").unlink()
  check("must contain a tokenizer.json, got none")
  check("none.json, which is not a file", folder, "--tokenizer", "none.json")
  write_json(folder / "config.json", model_type="vit")
  check("expected a text model or a LLaVA model, got a vision tower (vit)")
  write_json(folder / "config.json", model_type="bert")
  check("model_type must be one of llama")
  (folder / "config.json").unlink()
  check("expected a Hugging Face checkpoint or a run that has a checkpoint")
  long = with_tokenizer(tmp_path / "y", max_position_embeddings="8")
  check("max_position_embeddings must be a whole number above 0, got '8'", long)
  truncated = with_tokenizer(tmp_path / "z")
  (truncated / "model.safetensors").write_bytes(b"")
  check("must be a complete safetensors file", truncated)
