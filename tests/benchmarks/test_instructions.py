# SPDX-License-Identifier: Apache-2.0
"""Tests reading a listing of machine code."""

import collections

import pytest

from benchmarks import aot, instructions

# A listing by nvdisasm, including the padding at the end of a kernel.
LISTING = """\
.text.kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:-:-:06        /*0010*/                   ULDC.64 UR6, c[0x0][0x258]
   2:-:-:Y:01        /*0020*/               @P0 SHF.R.U32.HI R2, RZ, 0x4, R11
   -:-:2:Y:01        /*0030*/              @!PT MUFU.LG2 R26, R22 ;
   -:-:2:Y:01        /*10040*/                  FMNMX.NAN R3, R4, R5, !PT
   -:-:-:-:03        /*0050*/                   IMAD.WIDE.U32 R4, R25, 0x200, R4
   -:-:-:-:03        /*0060*/                   IMAD R4, R25, 0x200, R4
   -:-:-:Y:01        /*0070*/                   NOP
   -:-:-:Y:05        /*3790*/                   EXIT
.L_x_0:
   -:-:-:-:00        /*37a0*/                   BRA `(.L_x_0)
   -:-:-:Y:00        /*37b0*/                   NOP
"""


def test_instructions_are_counted_by_kind():
  found = instructions.opcodes(LISTING)
  assert found == collections.Counter(
    {
      "LDC": 1,
      "ULDC.64": 1,
      "SHF.R.U32.HI": 1,
      "MUFU.LG2": 1,
      "FMNMX.NAN": 1,
      "IMAD.WIDE.U32": 1,
      "IMAD": 1,
    }
  )
  per_value = instructions.by_kind(found)
  assert {k: v * 8 for k, v in per_value.items() if v} == {
    "memory": 1,
    "uniform": 1,
    "integer, compare": 2,
    "special": 1,
    "multiply-add": 2,
  }
  busy = instructions.clocks(found)
  # Integer instructions and comparisons take two clocks, logarithms eight.
  assert busy["integer, compare"] * 8 == 4
  assert busy["multiply-add"] * 8 == 4
  assert busy["special"] * 8 == 8
  assert busy["issue"] * 8 == 7


# A thread waits for a barrier after the loop's end.
LOOP = """\
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
.L_x_3:
   -:-:-:Y:01        /*0010*/               @P0 BRA `(.L_x_1)
   -:-:-:Y:01        /*0020*/                   UTMALDG.3D [UR8], [UR24]
   -:-:-:Y:01        /*0030*/                   UMOV UR9, UR17
.L_x_1:
   -:-:-:Y:01        /*0040*/              @!P1 BRA `(.L_x_2)
.L_x_4:
   -:-:-:Y:01        /*0050*/                   MUFU.LG2 R26, R22
   -:-:-:Y:01        /*0060*/                   NOP
   -:-:-:Y:01        /*0070*/               @P2 BRA `(.L_x_3)
   -:-:-:Y:05        /*0080*/                   EXIT
.L_x_2:
   -:-:-:Y:01        /*0090*/                   SYNCS P1, [R4], R3
   -:-:-:Y:01        /*00a0*/                   IMAD R3, R4, R5, R6
   -:-:-:Y:01        /*00b0*/                   IMAD R3, R4, R5, R6
   -:-:-:Y:01        /*00c0*/                   IMAD R3, R4, R5, R6
   -:-:-:Y:01        /*00d0*/               @P1 BRA `(.L_x_4)
   -:-:-:Y:01        /*00e0*/                   BRA `(.L_x_2)
.L_x_0:
   -:-:-:-:00        /*00f0*/                   BRA `(.L_x_0)
"""


def test_a_turn_is_counted_if_there_is_a_loop():
  assert instructions.opcodes(LOOP) == {
    "BRA": 3,
    "UTMALDG.3D": 0.25,
    "UMOV": 0.25,
    "MUFU.LG2": 1,
  }


def test_missing_disassembler_is_reported(monkeypatch):
  monkeypatch.setenv("PATH", "")
  with pytest.raises(
    aot.CompilerMissing, match="nvdisasm must be on the PATH, got none"
  ):
    instructions.disassembler()
