# SPDX-License-Identifier: Apache-2.0
"""Tests the script of `make test-versions`, with a fake Python."""

import shutil
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.docs.pages import ROOT

# A fake Python: `-m venv` installs it in an environment, other calls are
# recorded, and calls that contain $FAILS fail.
PYTHON = """#!/bin/sh
call="$0 $* remat3=$JAX_REMAT3$JAX_CUSTOM_VJP3"
case "$*" in
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *) echo "$call" >> calls ;;
esac
case "$call" in *"$FAILS"*) exit 1 ;; esac
"""


@pytest.fixture
def versions(tmp_path):
  """Returns a function that returns the script's status, errors and calls."""
  python = tmp_path / "python"
  python.write_text(PYTHON)
  python.chmod(0o755)
  script = shutil.copy(ROOT / "tests/versions.sh", tmp_path)

  def run(*arguments, fails="nothing"):
    environment = {
      "PATH": "/usr/bin:/bin",
      "PYTHON": str(python),
      "FAILS": fails,
    }
    done = subprocess.run(
      ["sh", script, *arguments],
      cwd=tmp_path,
      env=environment,
      capture_output=True,
      text=True,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    return done.returncode, done.stderr, calls

  return run


def test_each_environment_is_installed_and_tested(versions):
  status, _, calls = versions("-k", "some")
  assert status == 0
  assert [call.split("/")[2] for call in calls if "-m pytest" in call] == [
    "oldest",
    "middle",
    "newest",
    "newest",
  ]
  installs = [call for call in calls if "-m pip install" in call]
  assert len(installs) == 4
  assert all("--upgrade jax" in call for call in installs[2:])
  tests = [call for call in calls if "-m pytest" in call]
  assert [call.partition(" -k some ")[2] for call in tests] == [
    *3 * ["remat3="],
    "remat3=11",
  ]
  assert "tests/layers" not in tests[0]
  assert all("tests/layers" in call for call in tests[1:])


@pytest.mark.parametrize("step", ["pip", "pytest"])
def test_versions_after_a_failure_are_tested(versions, step):
  status, errors, calls = versions(fails=f"oldest/bin/python -m {step}")
  assert (status, errors) == (1, "failed: oldest\n")
  assert sum("-m pytest" in call for call in calls) == 3 + (step == "pytest")


def test_failure_with_remat3_is_named(versions):
  status, errors, _ = versions(fails="tests/models/test_remat.py remat3=11")
  assert (status, errors) == (1, "failed: newest-remat3\n")


def test_oldest_environment_has_the_oldest_accepted_versions(versions):
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  install = next(call for call in versions()[2] if "pip install" in call)
  for text in project["dependencies"]:
    needed = Requirement(text)
    for bound in needed.specifier:
      assert bound.operator == ">="
      version = bound.version + ".0" * (needed.name == "jax")
      assert f"{needed.name}=={version}" in install
