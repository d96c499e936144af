# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of commands that do not train, and what they print."""

import jax
import pytest

from tests.models.hf.folders import DATA
from tests.train.folders import with_tokenizer
from train import convert, evaluate, generate
from train.run.exits import exit_status
from train.run.writing import save_errors


def command(main, *line):
  return main([str(word) for word in line])


@pytest.mark.parametrize("name", ["evaluate", "generate", "convert"])
def test_too_little_memory_is_reported_in_one_line(
  name, tmp_path, monkeypatch, capsys
):
  def load(*_, **__):
    raise jax.errors.JaxRuntimeError(
      "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."
    )

  monkeypatch.setattr("train.source.load_hf", load)
  monkeypatch.setattr("train.pretrained.load_params", load)
  folder = with_tokenizer(tmp_path / "llama", begin=1)
  data, run = tmp_path / "data.txt", tmp_path / "run"
  data.write_text("a b c")
  main, line, remedy = {
    "evaluate": (evaluate.main, [folder, "--data", data], "lower --batch"),
    "generate": (generate.main, [folder, "--prompt", "a"], "--max-tokens"),
    "convert": (
      convert.main,
      ["import-hf", DATA / "llama", "--out", run, "--seq", 32],
      "JAX_PLATFORMS=cpu",
    ),
  }[name]
  assert command(main, *line) == 1
  last = capsys.readouterr().err.splitlines()[-1]
  words = "error: RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes; "
  assert last.startswith(words) and remedy in last
  assert not run.exists()


def test_exit_status_distinguishes_bad_input_from_failed_writes(
  tmp_path, capsys
):
  def unwritten():
    with save_errors(tmp_path / "file"):
      raise OSError(28, "No space left on device")

  def missing():
    (tmp_path / "none").read_text()

  def memory():
    raise MemoryError("Unable to allocate 2.00 PiB")

  for act, status, words in (
    (lambda: None, 0, ""),
    (
      unwritten,
      1,
      f"error: save: could not write {tmp_path / 'file'}: OSE",
    ),
    (memory, 1, "error: Out of memory. Unable to allocate 2.00 PiB; less"),
    (missing, 2, "error: [Errno 2] No such file"),
  ):
    assert exit_status(act, smaller="less") == status
    assert capsys.readouterr().err.startswith(words)

  def broken():
    raise jax.errors.JaxRuntimeError("INTERNAL: an illegal address")

  with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
    exit_status(broken, smaller="less")
