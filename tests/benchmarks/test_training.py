# SPDX-License-Identifier: Apache-2.0
"""Tests options of `benchmarks.training`."""

import json
import os

import pytest

from benchmarks import training


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "layers"), [([], 4), (["--layers", "1"], 1)]
)
def test_layers_option_sets_the_depth(options, layers, capsys, monkeypatch):
  monkeypatch.setattr(os, "environ", dict(os.environ))
  small = ["--preset", "demo", "--variant", "lean", "--batch", "1"]
  short = ["--seq", "128", "--steps", "1", "--in-process"]
  assert training.main([*small, *short, *options]) == 0
  row = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert row["case"]["layers"] == layers
  assert row["initialize_s"] > 0
  # By default JAX would leave a quarter of a GPU's memory unused.
  assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.935"
