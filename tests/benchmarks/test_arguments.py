# SPDX-License-Identifier: Apache-2.0
"""Tests that benchmarks check their arguments before they time anything."""

import subprocess

import jax
import pytest

from benchmarks import aot, layer, ops, optimizer, training, training_step
from benchmarks.arguments import command


def refused(main, arguments, capsys, status=2):
  with pytest.raises(SystemExit) as stopped:
    main([str(x) for x in arguments])
  assert stopped.value.code == status
  errors = capsys.readouterr().err
  assert "error: " in errors and "Traceback" not in errors
  return errors


@pytest.fixture
def timing_nothing(monkeypatch):
  """Fails if something is timed, trained or started."""

  def fail(*_, **__):
    raise AssertionError("work began before the arguments were checked")

  for module, name in (
    (optimizer, "copy_bandwidth"),
    (ops, "ceilings"),
    (layer, "time_rows"),
  ):
    monkeypatch.setattr(module, name, fail)
  monkeypatch.setattr(
    training.subprocess, "run", lambda line, **_: fail() if "-m" in line else 0
  )


@pytest.mark.parametrize(
  "main, arguments, words",
  [
    (optimizer.main, ["--rows", "-1"], "--rows"),
    (optimizer.main, ["--columns", "9" * 5000], "--columns"),
    (optimizer.main, ["--codecs", "caot"], "did you mean 'coat'"),
    (ops.main, ["--repeats", "0"], "--repeats"),
    (layer.main, ["--repeats", "1.5"], "--repeats"),
    (training.main, ["--steps", "0"], "--steps"),
    (training.main, ["--mesh", "fsdp=x"], "mesh: expected one size per axis"),
    (training.main, ["--mesh", "fsdp=3"], "mesh: fsdp must divide d_model"),
    (training.main, ["--in-process"], "pass --variant"),
  ],
)
def test_wrong_arguments_are_refused_before_anything_is_timed(
  main, arguments, words, timing_nothing, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert words in refused(main, arguments, capsys)


@pytest.mark.parametrize(
  "found, hbm, words",
  [
    (
      FileNotFoundError("no nvidia-smi"),
      80,
      "got the error no nvidia-smi; leave --hbm out",
    ),
    (subprocess.CalledProcessError(9, "nvidia-smi"), 80, "exit status 9"),
    ("", 80, "needs nvidia-smi to find a GPU's memory"),
    ("81920 MiB\n", 86, "at most 85.9, the GPU's memory in GB, got 86"),
    ("81920 MiB\n", "nan", "must be above 0"),
    ("81920 MiB\n", 0, "must be above 0"),
  ],
)
def test_hbm_must_fit_the_gpu(found, hbm, words, monkeypatch, capsys):
  def run(line, **_):
    assert line[0] == "nvidia-smi"
    if isinstance(found, Exception):
      raise found
    return subprocess.CompletedProcess(line, 0, found, "")

  monkeypatch.setattr(training.subprocess, "run", run)
  assert words in refused(training.main, ["--hbm", hbm], capsys)


def test_no_variant_runs_after_wrong_arguments(
  monkeypatch,
):
  calls = []

  def run(line, **_):
    calls.append(line)
    return subprocess.CompletedProcess(line, 2)

  monkeypatch.setattr(training.subprocess, "run", run)
  assert training.main(["--mesh", "data=4", "--preset", "demo"]) == 2
  assert len(calls) == 1


def test_mesh_that_does_not_use_all_devices_is_refused(capsys):
  line = ["--in-process", "--variant", "bf16", "--preset", "demo"]
  line += ["--mesh", "fsdp=2", "--seq", "32"]
  assert "for 2 devices, got 8" in refused(training.main, line, capsys)


@pytest.mark.parametrize(
  "error, status, words",
  [
    (MemoryError("of 2 PiB"), 1, "Out of memory. of 2 PiB; measure"),
    (
      jax.errors.JaxRuntimeError(
        "INTERNAL: Error dispatching computation: Out of memory allocating 9 "
        "bytes."
      ),
      1,
      "allocating 9 bytes; measure smaller sizes",
    ),
    (aot.CompilerMissing("install it"), 2, "error: install it"),
  ],
)
def test_lack_of_memory_or_a_compiler_exits_with_a_message(
  error, status, words, capsys
):
  @command
  def main(arguments=None):
    raise error

  assert words in refused(main, [], capsys, status=status)


def test_other_errors_of_a_benchmark_are_raised():
  @command
  def main(arguments=None):
    raise jax.errors.JaxRuntimeError("INTERNAL: an illegal address")

  with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
    main([])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("preset", ["demo", "demo_moe"])
def test_default_variants_are_those_that_the_options_allow(preset, accumulate):
  listed = training_step.variants_of(preset, accumulate=accumulate)
  for variant in training_step.VARIANTS:
    options = dict(batch=4, seq=64, accumulate=accumulate)
    if variant in listed:
      training_step.configure(preset, variant, **options)
    else:
      with pytest.raises(ValueError, match="experts fp8|optimizer_in_backward"):
        training_step.configure(preset, variant, **options)
