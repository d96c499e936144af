# SPDX-License-Identifier: Apache-2.0
"""Compiles Mosaic's block-scaled matmuls for an H200: one kernel, no spills."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.pallas.mosaic import block_product
from coat_jax.pallas.mosaic.block_product import TILES
from tests.aot.compiling import (
  check_wgmma,
  compile_for_h200,
  custom_calls,
  ptxas_reports,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

M, N, K = 8192, 4096, 11008
# Whether b has one scale per row, whether an array is added, and b's format.
FORMS = {
  "fwd": (False, False, E4M3),
  "add": (False, True, E4M3),
  "wgrad": (True, False, E5M2),
}


def compiled(name: str, form: str) -> jax.stages.Compiled:
  """Compiles one of `FORMS` of the matmul, with one of `TILES`."""
  of_rows, has_add, b_dtype = FORMS[form]
  spec, f32 = jax.ShapeDtypeStruct, jnp.float32
  b_scales = N if of_rows else N // 128
  a = QTensor(spec((M, K), E4M3), spec((M, K // 128), f32), 128)
  b = QTensor(spec((N, K), b_dtype), spec((b_scales, K // 128), f32), 128)
  add = [spec((M, N), jnp.bfloat16)] if has_add else []
  product = functools.partial(block_product.product, tile=TILES[name])
  dtype = jnp.float32 if of_rows else jnp.bfloat16
  return compile_for_h200(
    lambda a, b, *add: product(a, b, dtype, *add), a, b, *add
  )


@pytest.mark.parametrize("form", FORMS)
def test_block_scaled_matmul_is_one_kernel(form):
  program = compiled("paired", form)
  (kernel,) = custom_calls(program).items()
  assert kernel == ("mosaic_gpu_v2", 1)
  # Temporary memory holds only transposed scales.
  assert temporary_bytes(program) < 2 * 4 * (M + N) * K // 128


def compile_all(folder: str) -> None:
  """Compiles every tile and form; must run in a new process."""
  for name in TILES:
    for form in FORMS:
      os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/{name}-{form}"
      os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
      compiled(name, form)


def test_kernels_use_wgmma_and_spill_no_registers(tmp_path):
  folders = ptxas_reports(__name__, tmp_path)
  assert len(folders) == len(TILES) * len(FORMS)
  for folder in folders:
    check_wgmma(folder)
