# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels that use `mosaic.rows` for an H200, and executes their PTX.

`ptx_machine` repeats the checks of tests/pallas/mosaic in NumPy, because
Pallas' interpreter tests neither inlined instructions nor the lanes and
addresses of values. A kernel with few registers
lets enough programs share a multiprocessor to keep at least 40 KiB of loads in
flight.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import aot
from coat_jax.ops import Blocks, Groups
from coat_jax.ops.rope import Rotary
from coat_jax.pallas.mosaic import (
  device,
  norm,
  norm_backward,
  quantize,
  rows,
  tiles,
)
from tests.aot.ptx_machine import Machine
from tests.aot.test_registers import ptx_of, real_kernel
from tests.pallas.mosaic import (
  test_activation,
  test_codes,
  test_heads,
  test_norm,
  test_quantize,
)

pytestmark = pytest.mark.aot


@pytest.fixture
def on_machine(monkeypatch, tmp_path):
  """Makes kernels that use `mosaic.rows` run on `ptx_machine`."""

  def kernel(body, *, out_type, grid, interpret, **options):
    assert not interpret

    def call(*inputs):
      def real(inputs):
        return real_kernel(body, out_type=out_type, grid=grid, **options)(
          *inputs
        )

      specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
      jax.clear_caches()  # A cached kernel would write no files.
      with jax.disable_jit(False):
        ptx, order = ptx_of(real, [specs], tmp_path)
      out = [np.zeros(x.shape, x.dtype) for x in out_type]
      arrays = [*map(np.array, inputs), *out]
      *across, last = grid
      machine = Machine(ptx, [arrays[i] for i in order], (last, *across, 1)[:2])
      machine.run()
      return [jnp.asarray(x) for x in out]

    return call

  monkeypatch.setattr(rows.plgpu, "kernel", kernel)
  # One tile for each program of one warpgroup.
  run = functools.partial(tiles.run, warpgroups=1)
  monkeypatch.setattr(
    tiles, "run", lambda *args, warpgroups, **options: run(*args, **options)
  )
  monkeypatch.setattr(device, "multiprocessors", lambda: 2**16)
  with jax.disable_jit():
    yield


@pytest.mark.parametrize(
  "shape, dtype", [((80, 144), jnp.float32), ((48, 256), jnp.bfloat16)]
)
def test_quantization_matches_its_definition(on_machine, shape, dtype):
  test_quantize.check_kernels(shape, dtype, 1)


@pytest.mark.parametrize("scale", [0.01, 0.013, 0.3])
def test_quotients_halfway_between_codes_are_rounded_correctly(
  on_machine, scale
):
  test_quantize.check_ties(scale)


@pytest.mark.parametrize(
  "shape, kind, group_size",
  [
    ((48, 1152), "layer", 16),
    ((64, 1024), "rms", 16),
    ((32, 512), "layer", 128),
    ((32, 768), "rms", 64),
    ((32, 272), "rms", 16),
    # From 128 rows on, each warp has a row.
    ((144, 768), "rms", 32),
    ((128, 640), "layer", 128),
  ],
)
def test_norms_match_their_definitions(on_machine, shape, kind, group_size):
  test_norm.check_kernels(shape, kind, 1, group_size)


@pytest.mark.parametrize(
  "shape, group_size, activation, gated, dtype",
  [
    ((48, 144), 16, "silu", True, jnp.float32),
    ((80, 128), 128, "gelu_tanh", True, jnp.bfloat16),
    ((80, 128), 64, "gelu_tanh", False, jnp.float32),
    ((48, 160), 32, "gelu_quick", False, jnp.bfloat16),
  ],
)
def test_activations_match_their_definitions(
  on_machine, shape, group_size, activation, gated, dtype
):
  test_activation.check_kernels(
    shape, group_size, activation, gated, dtype, 2e-6
  )


@test_activation.ALL
def test_activations_of_large_values_match_their_definitions(
  on_machine, activation, gated
):
  test_activation.check_far_values(activation, gated)


def test_gelu_is_close_to_float64(on_machine):
  test_activation.check_gelu((48, 144), jnp.float32)


@pytest.mark.parametrize(
  "shape, dtype, theta, own",
  [
    ((2, 32, 2, 2, 64), jnp.bfloat16, None, False),
    ((2, 72, 6, 2, 24), jnp.float32, None, False),
    ((1, 48, 2, 1, 128), jnp.bfloat16, 1e4, False),
    ((2, 24, 4, 2, 64), jnp.float32, 1e4, True),
    ((1, 64, 2, 1, 256), jnp.bfloat16, 1e4, True),
    ((2, 40, 4, 2, 80), jnp.float32, Rotary(1e4, rotary_dim=32), False),
  ],
  ids=str,
)
def test_joined_heads_match_their_definition(
  on_machine, shape, dtype, theta, own
):
  test_heads.check(shape, dtype, 0.99, theta=theta, own=own)


def test_joined_and_transposed_codes_match_their_definitions(on_machine):
  test_codes.check_joined((2, 160, 80))
  test_codes.check_turned((3, 80, 144))


M = 8192
BF16, F32 = jnp.bfloat16, jnp.float32
SCALE = jax.ShapeDtypeStruct((), F32)


def report(fn, *specs, folder) -> tuple[int, int]:
  """Compiles one kernel; returns its register count and spilled bytes."""
  jax.clear_caches()  # A cached kernel would write no files.
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    aot.compile_for_h200(fn, *specs)
  [text] = [path.read_text() for path in folder.glob("*.ptxas")]
  [registers] = re.findall(r"Used (\d+) registers", text)
  [spills] = set(re.findall(r"(\d+) bytes spill stores", text))
  return int(registers), int(spills)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "fn, most",
  [
    (functools.partial(quantize.quantize_groups, groups=Groups(16)), 64),
    (functools.partial(quantize.quantize_groups, groups=Groups(128)), 64),
    (quantize.quantize_tensor, 64),
    (functools.partial(quantize.quantize_tensor, layout="columns"), 84),
    (functools.partial(quantize.quantize_tensor, layout="both"), 88),
  ],
  ids=["groups16", "groups128", "rows", "columns", "both"],
)
def test_quantization_needs_few_registers(fn, most, dtype, tmp_path):
  x = jax.ShapeDtypeStruct((M, 4096), dtype)
  if fn is not quantize.quantize_tensor and "groups" in fn.keywords:
    found = report(fn, x, folder=tmp_path)
  else:
    found = report(
      lambda x, scale: fn(x, scale=scale)[:2], x, SCALE, folder=tmp_path
    )
  registers, spills = found
  assert registers <= most and not spills


@pytest.mark.parametrize(
  "n, kind, most",
  [
    # Here each warp has a row. 4 programs fit on a multiprocessor.
    (1152, "layer", 120),
    (1280, "layer", 128),
    (4096, "rms", 80),
    (4096, "layer", 112),
    (8192, "layer", 224),
  ],
)
def test_norm_input_needs_few_registers(n, kind, most, tmp_path):
  x, _, gamma, beta, _ = test_norm.specs(M, n, kind)
  registers, spills = report(
    # With block scales, no second kernel computes the tensor's scale.
    lambda x, gamma, beta: norm.norm_input(
      x,
      gamma,
      beta,
      kind=kind,
      eps=1e-5,
      groups=Groups(16),
      output=Blocks(),
    ),
    x,
    gamma,
    beta,
    folder=tmp_path,
  )
  assert registers <= most and not spills


@pytest.mark.parametrize(
  "layout, group_size, most",
  [("rows", 16, 96), ("both", 16, 80), ("both", 128, 80)],
)
def test_norm_needs_few_registers(layout, group_size, most, tmp_path):
  _, x_q, gamma, beta, stats = test_norm.specs(M, 4096, "rms", group_size)
  registers, spills = report(
    lambda *args: norm.norm_fwd(*args[:-1], scale=args[-1], layout=layout)[:2],
    x_q,
    gamma,
    beta,
    stats,
    SCALE,
    folder=tmp_path,
  )
  assert registers <= most and not spills


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
  "n", [512, 768, 1024, 1152, 1536, 2048, 4096, 5120, 6656, 8192]
)
def test_programs_of_norm_backward_fit_on_a_multiprocessor(n, kind, tmp_path):
  x, x_q, gamma, _, stats = test_norm.specs(M, n, kind)
  registers, spills = report(
    lambda dy, x_q, gamma, stats, add: norm_backward.norm_bwd(
      dy, x_q, gamma, stats, add=add
    ),
    x,
    x_q,
    gamma,
    stats,
    x,
    folder=tmp_path,
  )
  share = norm_backward.pick_share(M, n, has_mean=kind == "layer")
  of_program = -(-registers // 8) * 8 * 128  # Registers come in eights.
  assert share.programs / 132 * of_program <= 2**16
  # A layer norm of the widest rows needs ten registers (40 bytes) too many.
  assert spills == (40 if (n, kind) == (8192, "layer") else 0)
