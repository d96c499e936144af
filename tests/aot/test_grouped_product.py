# SPDX-License-Identifier: Apache-2.0
"""Compiles Mosaic's grouped products for an H200: one kernel, no spills."""

import os

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops import Operand
from coat_jax.pallas.mosaic import grouped_product as kernels
from coat_jax.pallas.mosaic.grouped_product import TILES
from tests.aot.compiling import (
  check_wgmma,
  compile_for_h200,
  custom_calls,
  ptxas_reports,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

E, D, F, M = 128, 2048, 1536, 65536  # gate and up of Qwen3-30B-A3B
FORMS = "fwd", "dgrad", "wgrad"
COMPILED = [
  *((tile, form) for tile in TILES for form in FORMS[:2]),
  ("low", "wgrad"),
]


def arguments(form: str) -> tuple:
  spec, f32 = jax.ShapeDtypeStruct, jnp.float32
  x = Operand(spec((M, D), E4M3), spec((D, M), E4M3), spec((), f32))
  g = Operand(spec((M, F), E5M2), spec((F, M), E5M2), spec((), f32))
  w = Operand(spec((E, D, F), E4M3), spec((E, F, D), E4M3), spec((E,), f32))
  a, b = {"fwd": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[form]
  return a, b, spec((E,), jnp.int32)


def compiled(form: str) -> jax.stages.Compiled:
  run = getattr(kernels, f"grouped_linear_{form}")
  # A new function, since the tile may have changed since the last trace.
  return compile_for_h200(lambda *args: run(*args), *arguments(form))


@pytest.mark.parametrize("form", FORMS)
def test_grouped_product_is_one_kernel(form):
  program = compiled(form)
  assert custom_calls(program) == {"mosaic_gpu_v2": 1}
  # The table of tiles; XLA alone multiplies every row by every weight.
  assert temporary_bytes(program) < 2**17


def compile_all(folder: str) -> None:
  """Compiles every tile and form; run in a process of its own."""
  for name, form in COMPILED:
    kernels.TILES = dict.fromkeys(TILES, TILES[name])
    os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/{name}-{form}"
    os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
    compiled(form)


def test_no_register_spills(tmp_path):
  folders = ptxas_reports(__name__, tmp_path)
  assert len(folders) == len(COMPILED)
  for folder in folders:
    check_wgmma(folder)
