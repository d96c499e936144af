# SPDX-License-Identifier: Apache-2.0
"""`python -m train.generate` on finished runs."""

import contextlib
import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tests.train.runs import MODEL, run
from train import generate, step
from train.data.batches import train_iterator
from train.data.tokens import TokenSource
from train.presets import PRESETS
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.description import configuration, describe
from train.run.directory import RunDirectory

SHORT = dict(steps=2, eval_every=2, save_every=2, seq=48)
# Computes in f32, so that the summation order does not change chosen tokens.
PLAIN = dict(recipe="bf16", compute="float32", optim__codec="float32", **SHORT)
PROMPT = "def main("


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Returns a run's folder with a checkpoint of random weights."""
  folder = RunDirectory(tmp_path_factory.mktemp("runs") / "finished")
  demo = PRESETS["demo"]()
  config = dataclasses.replace(
    demo,
    model=dataclasses.replace(demo.model, **MODEL),
    recipe="bf16",
    compute="float32",
    seq=48,
    report_state=False,
  )
  state = step.initial_state(config, step.build_optimizer(config))
  # With larger weights, one token is by far the most probable.
  larger = jax.tree.map(lambda x: 5 * x, state.params)
  data = TokenSource(
    name="x", parts=[np.zeros(9, np.uint8)], vocab_size=256, held_out=0.5
  )
  folder.create(describe(config, data))
  with contextlib.closing(Checkpoints(folder.checkpoints, keep=1)) as opened:
    state = state._replace(params=larger)
    batches = train_iterator(data, seq_len=2, batch_size=1, seed=0)
    opened.save(2, state, batches, describe(config, data))
  return folder.path


def command(*words):
  """Runs the command in this process; returns the exit status."""
  try:
    return generate.main([str(word) for word in words])
  except SystemExit as exit:  # raised by tyro
    return exit.code


def greedy(path, prompt, count):
  """Decodes greedily with the run's model, without a cache."""
  folder = RunDirectory(path)
  found = folder.latest_step()
  saved = checkpoint.read_description(folder.checkpoints, found)
  config = configuration(saved)
  abstract = step.abstract_state(config, step.build_optimizer(config))
  state = checkpoint.restore_state(folder.checkpoints, found, abstract)
  graph = step.build_graph(config)

  @jax.jit
  def logits(params, tokens):
    hidden = nnx.merge(graph, params)(tokens)[0]
    return hidden @ params["head"].astype(hidden.dtype)

  row = [*prompt.encode()]
  for _ in range(count):
    padded = np.pad(row, (0, 48 - len(row)))[None]
    out = logits(state.params, jnp.asarray(padded, jnp.int32))
    row.append(int(np.argmax(out[len(row) - 1])))
  return bytes(row).decode(errors="replace")


def test_prompts_and_continuations_are_printed_with_speeds(finished, capsys):
  line = [finished, "--prompt", PROMPT, "--prompt", "import", "--max-tokens", 8]
  assert command(*line, "--temperature", 0) == 0
  printed = capsys.readouterr()
  want = [greedy(finished, prompt, 8) for prompt in (PROMPT, "import")]
  assert printed.out == "\n---\n".join(want) + "\n"
  assert "weights of step 2" in printed.err
  assert "prompts: 15 tokens, " in printed.err
  assert "; decoding: 14 tokens, " in printed.err


@pytest.mark.slow
def test_seed_determines_sampled_text(finished, capsys):
  line = [finished, "--prompt", PROMPT, "--max-tokens", 8, "--temperature", 5]
  line += ["--top-k", 50, "--top-p", 0.9]
  drawn = []
  for seed in (1, 1, 2):
    assert command(*line, "--seed", seed) == 0
    drawn.append(capsys.readouterr().out)
  assert drawn[0] == drawn[1] != drawn[2]
  # These options leave only the most probable token.
  line = [finished, "--prompt", PROMPT, "--max-tokens", 8, "--temperature", 5]
  want = greedy(finished, PROMPT, 8) + "\n"
  for narrow in (
    ["--top-k", 1, "--top-p", 0.9],
    ["--top-k", 9, "--top-p", 0.01],
  ):
    assert command(*line, *narrow) == 0
    assert capsys.readouterr().out == want


@pytest.mark.slow
@pytest.mark.parametrize("params", ["bfloat16", "bfloat16_low8"])
def test_generation_reads_stored_weights_as_layers_do(params, tmp_path, capsys):
  out = tmp_path / "run"
  options = PLAIN | dict(optim__codec="coat", params=params)
  assert run(out, **options) == 0
  capsys.readouterr()
  line = ["--prompt", PROMPT, "--max-tokens", 8, "--temperature", 0]
  assert command(out, *line) == 0
  assert capsys.readouterr().out == greedy(out, PROMPT, 8) + "\n"


@pytest.mark.slow
def test_run_trained_on_a_mesh_generates_on_one_device(tmp_path, capsys):
  out = tmp_path / "run"
  mesh = dict(mesh="data=2,fsdp=2,tensor=2", batch=4, grad_reduce="bfloat16")
  mesh |= dict(model__num_kv_heads=2, optim__group_size=32)
  assert run(out, **SHORT | mesh) == 0
  capsys.readouterr()
  assert command(out, "--prompt", PROMPT, "--max-tokens", 8) == 0
  assert capsys.readouterr().out.startswith(PROMPT)


def save_tokenizer(folder):
  """Saves a tokenizer of letters, and a template that appends b and c."""
  folder.mkdir()
  letters = "abcdefghijklmnopqrstuvwxyz"
  model = tokenizers.models.WordLevel(
    {letter: i for i, letter in enumerate(letters)}, unk_token="z"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.save(str(folder / "tokenizer.json"))
  template = "{% for m in messages %}{{ m.content }} b c{% endfor %}"
  config = json.dumps({"chat_template": template})
  (folder / "tokenizer_config.json").write_text(config)
  return folder / "tokenizer.json"


def test_chat_prompt_goes_through_the_template(finished, tmp_path, capsys):
  path = save_tokenizer(tmp_path / "tokenizer")
  line = [finished, "--tokenizer", path, "--max-tokens", 8]
  line += ["--temperature", 0]
  assert command(*line, "--prompt", "a b c") == 0
  plain = capsys.readouterr()
  assert command(*line, "--prompt", "a", "--chat") == 0
  chat = capsys.readouterr()
  # Both prompts have the same tokens; with --chat only the answer is printed.
  assert "prompts: 3 tokens" in plain.err and "prompts: 3 tokens" in chat.err
  assert plain.out == "a b c " + chat.out
  assert command(*line, "--prompt", " ") == 2
  assert "at least one token, got ' '" in capsys.readouterr().err
  path.with_name("tokenizer_config.json").unlink()
  assert command(*line, "--prompt", "a", "--chat") == 2
  assert "got none; put chat_template.jinja next to" in capsys.readouterr().err


@pytest.mark.parametrize(
  "words, message",
  [
    ([], "needs a prompt, got none; pass --prompt"),
    (["--prompt", ""], "at least one token, got ''"),
    (["--prompt", "x" * 41, "--max-tokens", 8], "48 tokens .* got 41 \\+ 8"),
    (["--prompt", "x", "--max-tokens", 0], "must be at least 1, got 0"),
    (["--prompt", "x", "--temperature", -1], "temperature .* got -1"),
    (["--prompt", "x", "--top-p", 0], "top_p must be .* got 0"),
    (["--prompt", "x", "--top-p", 1.5], "top_p must be .* got 1.5"),
    (["--prompt", "x", "--top-k", 0], "top_k must be at least 1, got 0"),
    (["--prompt", "x", "--max-tokens", 8, "--seed", -1], "seed must be"),
    (["--prompt", "x", "--chat"], "a chat template, got none"),
    (["--prompt", "x", "--tokenizer", "none.json"], "none.json, which is not"),
    (["--prompt", "x", "--no-such"], "(?s).*no-such"),
  ],
)
def test_bad_input_is_refused(finished, words, message, capsys):
  before = sorted(finished.rglob("*"))
  assert command(finished, *words) == 2
  printed = capsys.readouterr()
  assert printed.out == "" and sorted(finished.rglob("*")) == before
  assert re.search(message, printed.err)


def test_folder_without_a_whole_checkpoint_is_refused(
  finished, tmp_path, capsys
):
  copy = shutil.copytree(finished, tmp_path / "copy")
  (damaged,) = (copy / "checkpoints" / "2" / "params" / "d").iterdir()
  damaged.write_bytes(b"")
  for folder, message in (
    (
      tmp_path / "none",
      "expected a Hugging Face checkpoint or a run that has a checkpoint",
    ),
    (
      tmp_path,
      "expected a Hugging Face checkpoint or a run that has a checkpoint",
    ),
    (copy, "are damaged: "),
    ("", "model: expected a path"),
  ):
    assert command(folder, "--prompt", "x") == 2
    assert message in capsys.readouterr().err
