# SPDX-License-Identifier: Apache-2.0
"""Tests reading and drawing the live ranges that XLA writes."""

import pytest

from studies import live_ranges

# A scan over 3 layers with weights [8, 4]. The stack of their gradients has two
# names, and reuses the memory of activations that are no longer live.
LIVE = """\
HloLiveRange (max 6):
  InstructionSequence:
    0:a
    1:while.1
    2:b
    3:c
    4:while.2
    5:d
  BufferLiveRange:
    state_params__w__.1{}:0-6
    state_optimizer__m__.1{}:0-6
    while.1{0}:1-2
    loss{}:2-3
    while.2{0}:3-4
    alias{}:3-4
    unknown{}:0-5
  Live ranges at 1 (peak):
    while.1{0}: 9999 bytes
"""
ASSIGNED = """\
BufferAssignment:
allocation 0: size 192, page 0, parameter 0, shape |bf16[3,8,4]|:
 value: <1 state_params__w__.1 @0> (size=192,offset=0): bf16[3,8,4]{2,1,0}
allocation 1: size 100, page 0, parameter 1, shape |f32[25]|:
 value: <2 state_optimizer__m__.1 @0> (size=100,offset=0): f32[25]{0}
allocation 2: size 1000, page 0, preallocated-temp:
 value: <3 while.1{0} @0> (size=300,offset=0): bf16[3,50]{1,0}
 value: <4 loss @0> (size=500,offset=300): f32[125]{0}
 value: <5 while.2{0} @0> (size=192,offset=0): bf16[3,8,4]{2,1,0}
 value: <6 alias (phi) @0> (size=192,offset=0): bf16[96]{0}
"""


@pytest.fixture
def folder(tmp_path):
  for name, text in (("live-range", LIVE), ("buffer-assignment", ASSIGNED)):
    (tmp_path / f"module_1.step-{name}.txt").write_text(text)
  return tmp_path


def test_bytes_of_each_kind_of_array_are_summed(folder):
  found = live_ranges.read(folder, 3)
  rows = {kind: row.tolist() for kind, row in found.bytes_of.items()}
  assert rows == {
    "weights": [192] * 6,
    "optimizer": [100] * 6,
    "gradients": [0, 0, 0, 192, 192, 0],
    "activations": [0, 300, 300, 0, 0, 0],
    "temporary": [0, 0, 500, 500, 0, 0],
  }
  assert found.loops == [1, 3]
  assert found.peak == 192 + 100 + 300 + 500


def test_figure_is_drawn(folder, tmp_path):
  out = tmp_path / "figure.png"
  line = [str(folder), "--layers", "3", "--out", str(out)]
  live_ranges.main(line)
  assert out.read_bytes().startswith(b"\x89PNG")


def test_folder_without_a_dump_is_refused(tmp_path, capsys):
  line = [str(tmp_path), "--layers", "3", "--out", str(tmp_path / "a.png")]
  with pytest.raises(SystemExit, match="2"):
    live_ranges.main(line)
  assert "compile with XLA_FLAGS=--xla_dump_to" in capsys.readouterr().err
