# SPDX-License-Identifier: Apache-2.0
"""Tests compiling for an H200, and the helpers that examine programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import aot
from coat_jax.numerics.formats import E4M3, E5M2
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  fp8_matmul_calls,
  fp8_moves,
  peak_bytes,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

M, N, K = 512, 384, 256
FP8 = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def product(summed, precision=FP8):
  """Returns a function of a, b and a scale, and specs of these arguments.

  The function multiplies a matmul of a and b by the scale, in BF16. The matmul
  sums over axis `summed[0]` of a and axis `summed[1]` of b.
  """

  def fn(a, b, scale):
    dimensions = tuple((axis,) for axis in summed), ((), ())
    y = jax.lax.dot_general(
      a, b, dimensions, precision, preferred_element_type=jnp.bfloat16
    )
    return y * scale.astype(jnp.bfloat16)

  a = jax.ShapeDtypeStruct((M, K)[:: 1 if summed[0] else -1], E4M3)
  b = jax.ShapeDtypeStruct((N, K)[:: 1 if summed[1] else -1], E5M2)
  return fn, a, b, jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
  "summed, moved", [((1, 1), 0), ((1, 0), 1), ((0, 1), 1), ((0, 0), 2)]
)
def test_each_operand_in_the_wrong_layout_adds_one_transpose(summed, moved):
  compiled = compile_for_h200(*product(summed))
  assert custom_calls(compiled) == {"__cublas$lt$matmul$f8": 1}
  (call,) = fp8_matmul_calls(compiled)
  assert (
    call.shape.startswith(f"(bf16[{M},{N}]") and call.opcode == "custom-call"
  )
  assert [x.opcode for x in fp8_moves(compiled)] == ["fusion"] * moved
  # Temporary memory holds only cuBLASLt's workspace and transposed operands.
  arguments = (M + N) * K + 4
  assert temporary_bytes(compiled) < 2**25
  assert peak_bytes(compiled) > arguments + 2 * M * N


def test_options_reach_the_compiler():
  without_triton = {"xla_gpu_enable_triton_gemm": False}
  plain = product((1, 1), precision=None)
  compiled = compile_for_h200(*plain, options=without_triton)
  assert len(fp8_matmul_calls(compiled)) == 1
  # By default, XLA turns this matmul into a Triton fusion.
  assert not fp8_matmul_calls(compile_for_h200(*plain))


def test_identical_kernels_in_two_programs_are_compiled_once():
  def one(x):
    return jnp.sum(jnp.tanh(x), 1)

  def the_same(x):
    return one(x)

  def another(x):
    return jnp.sum(jnp.exp(x), 1)

  sizes = []
  for fn in (one, the_same, another):
    compile_for_h200(fn, jax.ShapeDtypeStruct((M, N), jnp.float32))
    sizes.append(aot.kernels("h200").stat().st_size)
  assert 0 < sizes[0] == sizes[1] < sizes[2]


def test_fp8_moves_finds_pads_but_not_casts():
  x = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
  cast = compile_for_h200(lambda x: x.T.astype(E4M3), x)
  assert not fp8_moves(cast)
  q = jax.ShapeDtypeStruct((M, N), E4M3)
  padded = compile_for_h200(lambda q: jnp.pad(q, ((0, 1), (0, 0))), q)
  assert len(fp8_moves(padded)) == 1


def test_donated_arguments_are_overwritten():
  x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

  def peak(**options):
    add = lambda tree: {"x": tree["x"] + 1}  # noqa: E731
    return peak_bytes(compile_for_h200(add, {"x": x}, **options))

  assert peak(donate=(0,)) <= peak() - x.size * 4


def test_cudnn_call_compiles_without_cudnn():
  q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
  attend = lambda q: jax.nn.dot_product_attention(  # noqa: E731
    q, q, q, is_causal=True, implementation="cudnn"
  )
  assert custom_calls(compile_for_h200(attend, q)) == {"__cudnn$fmhaSoftmax": 1}


def test_mesh_program_uses_the_memory_of_one_shard():
  mesh = jax.sharding.Mesh(np.array(aot.h200_devices(4)), ("fsdp",))
  where = jax.NamedSharding(mesh, jax.P("fsdp"))
  x = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=where)

  def peak(fn, **options):
    compiled = compile_for_h200(fn, x, mesh=mesh, **options)
    return peak_bytes(compiled), compiled.as_text()

  quarter = x.size  # Bytes per device: 4 per value, divided by 4.
  peak_of_sum, hlo = peak(lambda x: jnp.sum(x))
  assert "all-reduce" in hlo and peak_of_sum < 1.1 * quarter
  add, whole = lambda x: x + 1, jax.NamedSharding(mesh, jax.P())
  assert 2 * quarter <= peak(add, out_shardings=where)[0] < 2.1 * quarter
  assert peak(add, out_shardings=where, donate=(0,))[0] < 1.1 * quarter
  # A replicated result is gathered, and needs memory for the whole array.
  peak_of_whole, hlo = peak(add, out_shardings=whole)
  assert "all-gather" in hlo and peak_of_whole >= 5 * quarter


def test_error_says_how_to_install_the_compiler(monkeypatch):
  monkeypatch.setattr(aot, "available", lambda: False)
  with pytest.raises(RuntimeError, match="make test-aot"):
    compile_for_h200(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32))
  with pytest.raises(RuntimeError, match="make test-aot"):
    aot.h200_devices(2)
