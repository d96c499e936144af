# SPDX-License-Identifier: Apache-2.0
"""Checks what `make train` and `make test` install and run.

The Makefile runs in an empty folder. A fake Python records its arguments. Some
tests add a fake nvidia-smi.
"""

import shutil
import stat
import subprocess

import pytest

from tests.docs.pages import ROOT

# A fake Python: `-m venv` installs it in .venv, `-c` runs nothing, and all other
# calls are recorded.
PYTHON = """#!/bin/sh
case "$*" in
  "-c print("*) echo ok ;;
  "-c import sys"*) exit 0 ;;
  "-c import jax"*) exit $JAX_FINDS_NO_GPU ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *) echo "$JAX_PLATFORMS $*" >> calls ;;
esac
"""
TOOLS = ("sh", "echo", "rm", "touch", "mktemp", "mkdir", "cp", "make")


@pytest.fixture
def make(tmp_path):
  """Returns a function that runs make and returns (process, Python's calls)."""
  for name in ("Makefile", "pyproject.toml", "constraints.txt"):
    shutil.copy(ROOT / name, tmp_path)
  tools = tmp_path / "tools"
  tools.mkdir()
  for name in TOOLS:
    (tools / name).symlink_to(shutil.which(name))

  def script(name, text):
    path = tools / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path

  python = script("python", PYTHON)

  def run(*arguments, nvidia_smi=None, finds_gpu=True):
    if nvidia_smi is not None:
      script("nvidia-smi", f"#!/bin/sh\nexit {nvidia_smi}\n")
    environment = dict(
      PATH=str(tools),
      PYTHON=str(python),
      JAX_FINDS_NO_GPU=str(int(not finds_gpu)),
      TMPDIR=str(tmp_path),
    )
    done = subprocess.run(
      ["make", *arguments],
      cwd=tmp_path,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    return done, [" ".join(call.split()) for call in calls]

  return run


def installed(call):
  """Returns the extras that a call of pip installs."""
  assert "-m pip install" in call
  return set(call[call.index("[") + 1 : call.index("]")].split(","))


def test_with_a_gpu_make_train_installs_cuda_and_trains_on_it(make):
  done, (first, second, train) = make("train", nvidia_smi=0)
  assert done.returncode == 0, done.stdout
  assert "cuda" not in installed(first) and "cuda" in installed(second)
  assert train == "-m train.pretrain demo_gpu --compare bf16 --overwrite"
  lines = [x for x in done.stdout.splitlines() if x.startswith("NVIDIA GPU")]
  assert lines == [
    "NVIDIA GPU: training demo_gpu there (`make train GPU=` for the CPU)"
  ]


@pytest.mark.parametrize("nvidia_smi", [None, 9])
def test_without_a_gpu_make_train_does_not_install_cuda(make, nvidia_smi):
  done, (pip, train) = make("train", nvidia_smi=nvidia_smi)
  assert done.returncode == 0 and "NVIDIA" not in done.stdout
  assert installed(pip) == {"train", "vision", "test", "lint", "docs"}
  assert train == "-m train.pretrain demo --compare bf16 --overwrite"


def test_make_train_can_ignore_the_gpu(make):
  _, (pip, train) = make("train", "GPU=", nvidia_smi=0)
  assert "cuda" not in installed(pip)
  assert train == "cpu -m train.pretrain demo --compare bf16 --overwrite"


def test_make_train_fails_if_jax_does_not_find_the_gpu(make):
  done, calls = make("train", nvidia_smi=0, finds_gpu=False)
  assert done.returncode and "needs a driver of version 580" in done.stdout
  assert not any("train.pretrain" in call for call in calls)


def test_make_test_runs_on_the_cpu_even_with_a_gpu(make):
  done, (pip, suite) = make("test", nvidia_smi=0)
  assert done.returncode == 0, done.stdout
  assert "cuda" not in installed(pip)
  assert suite.startswith("cpu -m pytest") and "not gpu" in suite


def test_evaluation_harness_is_installed_by_make_test_eval(make):
  done, (first, second, suite) = make("test-eval")
  assert done.returncode == 0, done.stdout
  assert "eval" not in installed(first) and "eval" in installed(second)
  assert suite.startswith("cpu -m pytest") and "tests/train/eval" in suite
