# SPDX-License-Identifier: Apache-2.0
"""train.pretrain from the command line: killed, resumed, misused."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from tests.train.runs import (
  contents,
  losses,
  programs_on_disk,
  run,
  start,
  wait_for_step,
)
from train import loop, pretrain, step
from train.run import checkpoint, processes
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")) as environment:
    yield environment


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Returns a finished run, which no test changes."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(out) == 0
  return out


@pytest.mark.slow
def test_stopped_and_killed_run_resumes_bit_for_bit(tmp_path, compiled_once):
  out = tmp_path / "killed"
  process = start(out, environment=compiled_once)
  wait_for_step(process, out, 22)
  process.send_signal(signal.SIGTERM)
  output = process.communicate(timeout=60)[0]
  assert process.returncode == 143, output
  assert "pass --resume to continue" in output
  saved = RunDirectory(out).latest_step()
  assert saved % 20, "saved only every 20 steps, not where it was stopped"

  process = start(out, "--resume", environment=compiled_once)
  wait_for_step(process, out, 70)
  process.kill()
  process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL
  assert saved < RunDirectory(out).latest_step() < 120

  never = start(tmp_path / "never", environment=compiled_once)
  process = start(out, "--resume", environment=compiled_once)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == 0, output
  assert "Traceback" not in output and "Error" not in output
  output = never.communicate(timeout=120)[0]
  assert never.returncode == 0, output
  assert losses(out) == losses(tmp_path / "never")
  assert max(losses(out)) >= (120, "loss")


def test_finished_run_has_table_plot_and_last_checkpoint(finished, capsys):
  assert run(finished, "--resume") == 0
  output, errors = capsys.readouterr()
  assert "all 8 steps are already done" in errors
  assert "these changes" not in errors
  for words in ("training loss", "held-out loss", "bytes/token/layer"):
    assert words in output
  # Three panels of 900 x 600 pixels: losses, powers, errors.
  picture = matplotlib.image.imread(finished / "plot.png")
  assert picture.shape[:2] == (600, 2700)
  assert RunDirectory(finished).latest_step() == 8
  steps = [step for step, key in losses(finished) if key == "loss"]
  assert steps == list(range(1, 9))
  assert {step for step, key in losses(finished) if "held" in key} == {4, 8}


def test_changes_to_a_finished_run_are_reported(finished, capsys):
  assert run(finished, "--resume", optim__lr=1e-4) == 0
  words = r"no effect; pass a larger --steps.*\n  optim\.lr: \S+ -> 0\.0001\n"
  assert re.search(words, capsys.readouterr().err)


@pytest.mark.slow
def test_finished_run_can_be_extended(copied, capsys):
  before = losses(copied)
  assert run(copied, "--resume", steps=10) == 0
  errors = capsys.readouterr().err
  assert "steps: 8 -> 10" in errors
  assert len(re.findall(r"compiling\n.*: compiled in \d+ s\n", errors)) == 1
  after = losses(copied)
  assert before.items() < after.items()
  assert (10, "held_out_loss") in after


@pytest.mark.parametrize(
  "flags, options, words",
  [
    ([], {}, "already contains a run; pass --resume"),
    (["--resume", "--recipe", "bf16"], {}, "recipe: coat -> bf16"),
    (["--resume"], dict(optim__codec="log8"), "optim.codec: coat -> log8"),
    (["--resume"], dict(model__d_ff=64), "model.d_ff: 128 -> 64"),
    (["--resume"], dict(data__held_out=0.2), "data.held_out: 0.05 -> 0.2"),
    (["--resume", "--overwrite"], {}, "are mutually exclusive"),
    (["--overwrite"], dict(data__path="missing"), "path must exist"),
    (["--overwrite"], dict(data__path="empty"), "data must not be empty"),
    (["--data.path=a"], dict(data__path="b"), "given several times"),
    (["--overwrite"], dict(data__path="short"), "at least 33 tokens each"),
    (
      ["--overwrite"],
      dict(data__path="ids", data__dtype="uint16"),
      "below the vocabulary size 256, got 300",
    ),
    (["--overwrite"], dict(recipee="bf16"), "--recipe {coat,bf16,fp8_linear"),
    (["--overwrite"], dict(recipe="bf17"), "'coat', 'bf16', 'fp8_linear'"),
    (["--overwrite"], dict(optim__codec="caot"), "did you mean 'coat'?"),
    (["--overwrite"], dict(model__d_model=65), "a multiple of 2 * num_heads"),
  ],
)
def test_bad_input_is_reported_and_changes_nothing(
  finished, tmp_path, monkeypatch, capfd, flags, options, words
):
  monkeypatch.chdir(tmp_path)
  Path("empty").touch()
  Path("short").write_text("too short a text")
  np.full(40000, 300, np.uint16).tofile("ids")
  before = contents(finished)
  assert run(finished, *flags, **options) == 2
  errors = " ".join(capfd.readouterr().err.replace("│", " ").split())
  assert words in errors
  assert "Traceback" not in errors
  assert contents(finished) == before
  assert not Path("runs").exists()


def test_resume_with_other_data_is_rejected(finished, tmp_path, capsys):
  text = tmp_path / "text"
  text.write_text("Different words from before. " * 500)
  assert run(finished, "--resume", data__path=text) == 2
  assert "data: the fingerprint differs" in capsys.readouterr().err


def test_resume_without_a_run_is_rejected(tmp_path, capsys):
  assert run(tmp_path / "none", "--resume") == 2
  assert "expected a run with a checkpoint in" in capsys.readouterr().err
  assert not (tmp_path / "none").exists()


def test_unknown_preset_is_reported_with_the_known_ones(capsys):
  with pytest.raises(SystemExit, match="2"):
    pretrain.main(["dmeo"])
  assert "demo, demo_gpu, demo_moe, llama_60m" in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_ids_found_during_training_are_reported(tmp_path, capsys):
  # At the start, only 64 samples of 4096 ids each are checked. The wrong ids
  # are between two samples, in the first held-out window.
  ids = np.ones(2_000_000, np.uint16)
  ids[1_900_000:1_900_033] = 300
  ids.tofile(tmp_path / "ids")
  options = dict(data__path=tmp_path / "ids", data__dtype="uint16")
  assert run(tmp_path / "out", **options) == 2
  errors = capsys.readouterr().err
  assert "compiling" in errors and "got 300" in errors
  assert "Traceback" not in errors


@pytest.mark.slow
def test_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
  # With this learning rate, the loss is NaN after the first update.
  out = tmp_path / "out"
  assert run(out, optim__lr=1e37, save_every=3, optim__warmup=0) == 1
  errors = capsys.readouterr().err
  assert "step 2 has loss nan" in errors
  assert "not finite: embedding, " in errors and "mlp/down" in errors
  assert "there is no earlier checkpoint" in errors
  rows = list(read_metrics(out / "metrics.jsonl"))
  assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_state_with_a_held_out_loss_of_nan_is_not_saved(
  finished, tmp_path, monkeypatch, capsys
):
  out = tmp_path / "copy"
  subprocess.run(["cp", "-r", finished, out], check=True)
  monkeypatch.setattr(
    loop.step,
    "eval_step",
    lambda graph, **_: lambda p, t: step.Evaluation(jnp.float32(jnp.nan), None),
  )
  assert run(out, "--resume", steps=10, save_every=1) == 1
  errors = capsys.readouterr().err
  assert "after step 9 the held-out loss is nan" in errors
  assert f"last good checkpoint is {out / 'checkpoints' / '8'}" in errors
  assert RunDirectory(out).latest_step() == 8


@pytest.mark.parametrize(
  "error, words",
  [
    (
      jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 29.20GiB.\n"
        "and a page of what was allocated"
      ),
      "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 29.20GiB",
    ),
    # A CPU raises these messages, at once or in a dispatched step.
    (
      jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."
      ),
      "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes",
    ),
    (
      jax.errors.JaxRuntimeError(
        "INTERNAL: Error dispatching computation: Out of memory allocating 99 "
        "bytes."
      ),
      "INTERNAL: Error dispatching computation: Out of memory allocating 99",
    ),
    (MemoryError(), "Out of memory;"),
    (MemoryError("Unable to allocate 2.00 PiB"), "Out of memory. Unable to"),
  ],
)
def test_too_little_memory_is_reported_in_one_line(
  error, words, tmp_path, monkeypatch, capsys
):
  def without_memory(*_):
    raise error

  monkeypatch.setattr(loop.step, "initial_state", without_memory)
  assert run(tmp_path / "out") == 1
  last = capsys.readouterr().err.splitlines()[-1]
  assert last.startswith(f"error: {words}")
  assert "raise --accumulate" in last and "train.plan" in last


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.write_text"])
def test_full_disk_at_the_start_is_reported_with_the_folder(
  call, tmp_path, monkeypatch, capsys
):
  def full(*_):
    raise OSError(28, "No space left on device")

  # These calls write config.json and the lock.
  monkeypatch.setattr(call, full)
  assert run(tmp_path / "out") == 1
  last = capsys.readouterr().err.splitlines()[-1]
  words = f"could not write {tmp_path / 'out'}: OSError ([Errno 28] No sp"
  assert last.startswith(f"error: save: {words}")
  assert not (tmp_path / "out").exists()


@pytest.fixture
def copied(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / "copy")


def test_overwriting_run_that_fails_early_leaves_the_old_one(
  copied, monkeypatch, capsys
):
  def without_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

  before = contents(copied)
  monkeypatch.setattr(loop.step, "initial_state", without_memory)
  assert run(copied, "--overwrite") == 1
  assert contents(copied) == before | {"lock": contents(copied)["lock"]}
  monkeypatch.undo()
  assert run(copied, "--resume") == 0
  assert "all 8 steps are already done" in capsys.readouterr().err


@pytest.mark.slow
def test_overwriting_run_replaces_the_old_one(copied):
  assert run(copied, "--overwrite", steps=2, optim__lr=1e-4) == 0
  assert RunDirectory(copied).latest_step() == 2
  assert {step for step, _ in losses(copied)} == {1, 2}


@pytest.mark.slow
def test_folder_renamed_during_the_run_is_reported_and_keeps_checkpoints(
  tmp_path, monkeypatch, capsys
):
  out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"

  def look(progress, done, loss, speed):
    if done == 6:
      while RunDirectory(out).latest_step() != 4:
        time.sleep(0.01)
      out.rename(elsewhere)

  monkeypatch.setattr(loop.Progress, "step", look)
  assert run(out) == 1
  errors = capsys.readouterr().err.splitlines()
  assert f"{out} was removed or renamed during the run" in errors[-1]
  assert not out.exists()
  elsewhere.rename(out)
  assert checkpoint.newest_whole_step(RunDirectory(out).checkpoints) == (4, [])


@pytest.mark.slow
def test_token_file_truncated_during_the_run_is_reported(
  tmp_path, monkeypatch, capsys
):
  ids = tmp_path / "ids"
  np.ones(2_000_000, np.uint16).tofile(ids)

  def look(progress, done, loss, speed):
    os.truncate(ids, 4096)

  monkeypatch.setattr(loop.Progress, "step", look)
  options = dict(data__path=ids, data__dtype="uint16", steps=60)
  assert run(tmp_path / "out", **options) == 2
  errors = capsys.readouterr().err.splitlines()
  assert (
    "must have at least 4000000 bytes, as when the run started" in errors[-1]
  )


def test_other_device_errors_are_not_reported_as_memory(tmp_path, monkeypatch):
  def broken(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: an illegal address")

  monkeypatch.setattr(loop.step, "initial_state", broken)
  with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
    run(tmp_path / "out")


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, {"XLA_CLIENT_MEM_FRACTION": "0.935"}),
    *[
      ({name: "0.5"}, {name: "0.5"})
      for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    ],
  ],
)
def test_gpu_memory_is_reserved_unless_the_environment_says_how_much(
  given, expected, monkeypatch
):
  monkeypatch.setattr(os, "environ", dict(given))
  processes.reserve_gpu_memory()
  assert os.environ == expected


@pytest.mark.slow
def test_recipe_int8_trains(tmp_path):
  assert run(tmp_path / "out", recipe="int8", attention="fp8") == 0
  found = losses(tmp_path / "out")
  assert found[8, "held_out_loss"] < found[1, "loss"]


@pytest.mark.slow
def test_run_is_compared_with_twins_of_its_seed_and_of_the_next(
  tmp_path, capsys
):
  out = tmp_path / "out"
  flags = ("--compare", "bf16", "--compare-seeds", "2")
  assert run(out, *flags) == 0
  header = capsys.readouterr().out.splitlines()[0].split("  ")
  assert [name.strip() for name in header if name] == [
    *("coat", "bf16", "bf16 seed 1", "difference", "spread of bf16")
  ]
  twins = RunDirectory(out).twins()
  assert [twin.path.name for twin in twins] == ["bf16_seed_0", "bf16_seed_1"]
  saved = json.loads(twins[0].config.read_text())["config"]
  assert (saved["recipe"], saved["optim"]["codec"]) == ("bf16", "float32")
  # The first losses are those of the initial weights. Rounding to BF16 (2^-9)
  # or E4M3 (2^-4) changes them far less than another seed does.
  mine, same, other = (
    losses(folder.path)[1, "loss"] for folder in (RunDirectory(out), *twins)
  )
  assert abs(mine - same) < 0.1 * abs(same - other)
  assert all(math.isfinite(loss) for loss in (mine, same, other))
  # A run that stopped after its first twin resumes with the second.
  before = losses(out), losses(twins[0].path), losses(twins[1].path)
  twins[1].remove()
  assert run(out, "--resume", *flags) == 0
  assert (losses(out), *(losses(twin.path) for twin in twins)) == before
