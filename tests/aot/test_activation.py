# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels of activation functions for an H200; none may spill.

Only compilation finds a store that Mosaic cannot lower. So the variants include
every activation function, group size and dtype that the kernels support.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.pallas.mosaic import activation as kernels
from coat_jax.pallas.mosaic.activation_input import activation_input
from tests.pallas.mosaic.test_activation import CASES

pytestmark = pytest.mark.aot

BF16, F32 = jnp.bfloat16, jnp.float32
SCALE = jax.ShapeDtypeStruct((), F32)


def values(m, n, group_size=16) -> QTensor:
  codes = jax.ShapeDtypeStruct((m, n), E4M3)
  scale = jax.ShapeDtypeStruct((m, n // group_size), BF16)
  return QTensor(codes, scale, group_size)


def assert_no_spills(fn, *specs, folder, count):
  """Checks that `fn` compiles to `count` kernels, and that none spills."""
  jax.clear_caches()  # A cached kernel would write no files.
  folder.mkdir()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    aot.compile_for_h200(fn, *specs)
  reports = [path.read_text() for path in folder.glob("*.ptxas")]
  assert len(reports) == count
  for report in reports:
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}


# Tiles have 64 rows in BF16 and 32 in f32, so the last tile overlaps another.
VARIANTS = [
  ("silu", True, group_size, dtype, shape)
  for group_size in (16, 32, 64, 128)
  for dtype, shape in (
    (BF16, (1008, 1408 + group_size)),
    (F32, (48, 1152 + group_size)),
  )
]
VARIANTS += [(*case, 16, BF16, (1008, 1424)) for case in CASES[1:]]


@pytest.mark.parametrize(
  "activation, gated, group_size, dtype, shape, has_factor",
  [(*variant, False) for variant in VARIANTS]
  # Experts use a factor, and always have gated SiLU.
  + [(*variant, True) for variant in VARIANTS if variant[:2] == CASES[0]],
)
def test_activation_kernels_do_not_spill(
  activation, gated, group_size, dtype, shape, has_factor, tmp_path
):
  (m, n), count, how = shape, 1 + gated, dict(activation=activation)
  factor = jax.ShapeDtypeStruct((m, 1), F32) if has_factor else None
  assert_no_spills(
    lambda x, factor: activation_input(
      x, gated=gated, groups=Groups(group_size), factor=factor, **how
    ),
    *(jax.ShapeDtypeStruct((m, count * n), dtype), factor),
    folder=tmp_path / "input",
    count=2,
  )
  parts = (values(m, n, group_size),) * count
  assert_no_spills(
    lambda parts, scale, factor: (
      kernels.activation_fwd(parts, scale=scale, factor=factor, **how).rows
    ),
    *(parts, SCALE, factor),
    folder=tmp_path / "fwd",
    count=1,
  )
  dy = jax.ShapeDtypeStruct((m, n), dtype)
  for has_sums in (False,) if gated else (False, True):
    assert_no_spills(
      lambda dy, parts, scale, factor, has_sums=has_sums: (
        kernels.activation_bwd_operands(
          dy, parts, scale=scale, factor=factor, has_sums=has_sums, **how
        )
      ),
      *(dy, parts, SCALE, factor),
      folder=tmp_path / f"bwd{has_sums}",
      count=3,
    )
