# SPDX-License-Identifier: Apache-2.0
"""Compiles Mosaic's grouped matmuls for an H200: one kernel, no spills."""

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
DTYPES = {"fp8": E4M3, "bf16": jnp.bfloat16, "f16": jnp.float16}
# The tile (gradients have their own), the operands' format, the matmul, and the
# options of the call.
COMPILED = [
  *(
    (tile, operands, form, {})
    for operands in DTYPES
    for form in FORMS
    for tile in (TILES if form != "wgrad" else ["own"])
  ),
  ("own", "fp8", "wgrad", dict(dtype=jnp.bfloat16)),
  ("own", "fp8", "wgrad", dict(rows_first=True)),
  ("own", "bf16", "wgrad", dict(dtype=jnp.bfloat16)),
  ("own", "bf16", "wgrad", dict(rows_first=True)),
]


def arguments(operands: str, form: str) -> tuple:
  spec, f32 = jax.ShapeDtypeStruct, jnp.float32
  if operands != "fp8":
    shapes = {"x": (M, D), "g": (M, F), "w": (E, D, F)}
    names = {"fwd": "xw", "dgrad": "gw", "wgrad": "xg"}[form]
    arrays = (spec(shapes[name], DTYPES[operands]) for name in names)
    return *arrays, spec((E,), jnp.int32)
  x = Operand(spec((M, D), E4M3), spec((D, M), E4M3), spec((), f32))
  g = Operand(spec((M, F), E5M2), spec((F, M), E5M2), spec((), f32))
  w = Operand(spec((E, D, F), E4M3), spec((E, F, D), E4M3), spec((E,), f32))
  a, b = {"fwd": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[form]
  return a, b, spec((E,), jnp.int32)


def compiled(operands: str, form: str, **options) -> jax.stages.Compiled:
  name = "grouped_linear" if operands == "fp8" else "grouped"
  run = getattr(kernels, f"{name}_{form}")
  # Make a new function, because the tile may have changed since the last trace.
  return compile_for_h200(
    lambda *args: run(*args, **options), *arguments(operands, form)
  )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operands", DTYPES)
def test_grouped_matmul_is_one_kernel(operands, form):
  program = compiled(operands, form)
  assert custom_calls(program) == {"mosaic_gpu_v2": 1}
  # Temporary memory holds only the table of tiles.
  assert temporary_bytes(program) < 2**17


def compile_all(folder: str) -> None:
  """Compiles all of COMPILED; must run in a new process."""
  for i, (tile, operands, form, options) in enumerate(COMPILED):
    kernels.THREE = TILES.get(tile, kernels.THREE)
    os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/{i}-{tile}-{operands}-{form}"
    os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
    compiled(operands, form, **options)


def test_kernels_use_wgmma_and_spill_no_registers(tmp_path):
  folders = ptxas_reports(__name__, tmp_path)
  assert len(folders) == len(COMPILED)
  for folder in folders:
    check_wgmma(folder, "m64n128k32" if "fp8" in folder.name else "m64n128k16")
