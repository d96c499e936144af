# SPDX-License-Identifier: Apache-2.0
"""The code of docs/layers.md runs; its table is what we count."""

import re
from pathlib import Path

import pytest

from benchmarks.memory import RECIPES
from train.memory import KINDS, residual_bytes
from train.presets import PRESETS

TEXT = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()


def test_code_runs():
  blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  assert len(blocks) == 4
  exec(compile("\n".join(blocks), "docs/layers.md", "exec"), {})


def test_table_is_what_is_counted():
  section = TEXT.split("## What is remembered")[1].split("\n## ")[0]
  rows = re.findall(r"^\| ([^|]+?) \| ([^|]*\d.*) \|$", section, re.MULTILINE)
  table = {
    name.strip("*"): [float(x.strip("* ")) for x in cells.split("|")]
    for name, cells in rows
  }
  names = list(table)
  assert len(names) == len(KINDS) + 1 and names[-1] == "total"
  config = PRESETS["llama2_7b"]().model
  for column, recipe in enumerate(RECIPES):
    counted = residual_bytes(config, recipe, tokens=256)
    for name, kind in zip(names, (*KINDS, "total"), strict=True):
      # Two decimals; RoPE's 4 bytes a token and the scalars are below one.
      want = counted[kind] / (2 * config.d_model)
      assert table[name][column] == pytest.approx(want, abs=6e-3), (name, kind)
