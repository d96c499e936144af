# SPDX-License-Identifier: Apache-2.0
"""Tests matmuls and memory of programs that are compiled for TPUs."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import layer, tpu
from benchmarks.aot import temporary_bytes
from coat_jax import ops, recipes
from coat_jax.layers.product import quantized_weight
from coat_jax.models.config import ModelConfig
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor

PROGRAM = """
  %a = f8e4m3fn[64,32]{1,0:T(8,128)(4,1)} fusion(%x), kind=kLoop
  %b.1 = bf16[16,32]{1,0} parameter(0)
  %c = f32[64,16]{1,0} convolution(%a, %b.1), dim_labels=bf_oi->bf
  %d = f32[64,16]{1,0} dot(%b.1, %b.1), lhs_contracting_dims={1}
"""


def test_matmuls_are_counted_by_the_dtypes_of_operands():
  assert tpu.products(PROGRAM) == {"bf16 * bf16": 1, "bf16 * f8e4m3fn": 1}


def operand(*shape: int, dtype=E4M3, columns: bool = False) -> ops.Operand:
  codes = jax.ShapeDtypeStruct(shape, dtype)
  scale = jax.ShapeDtypeStruct((), jnp.float32)
  both = (None, codes) if columns else (codes, None)
  return ops.Operand(*both, scale)


PRODUCTS = [
  (ops.linear_fwd, operand(512, 256), operand(384, 256, columns=True)),
  (ops.linear_dgrad, operand(512, 384, dtype=E5M2), operand(256, 384)),
  (
    ops.linear_wgrad,
    operand(256, 512, columns=True),
    operand(384, 512, dtype=E5M2, columns=True),
  ),
]


@pytest.mark.tpu
@pytest.mark.parametrize("op, a, b", PRODUCTS, ids=["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v6e:2x2"])
def test_matmuls_read_fp8(name, op, a, b):
  compiled = tpu.compile_for_tpu(name, op, a, b)
  second = "f8e4m3fn" if op is ops.linear_fwd else "f8e5m2"
  assert tpu.products(compiled.as_text()) == {f"f8e4m3fn * {second}": 1}


@pytest.mark.tpu
def test_linear_matmuls_of_a_decoder_layer_read_fp8_on_tpu7x():
  config = ModelConfig(
    family="llama",
    num_layers=1,
    d_model=512,
    d_ff=1024,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=4096,
  )
  one = layer.Layer(config, layer.VARIANTS["minimal"])
  specs = layer.make_specs(one, (2, 512, 512), jnp.float32)
  full = layer.with_gradients(one.forward)
  compiled = tpu.compile_for_tpu("tpu7x:2x2x1", full, *specs)
  counted = tpu.products(compiled.as_text())
  del counted["bf16 * bf16"]  # These belong to attention.
  # The weights qkv, out, gate_up and down have one matmul each in the forward
  # pass, and two in the backward pass.
  assert counted == {"f8e4m3fn * f8e4m3fn": 4, "f8e4m3fn * f8e5m2": 8}


@pytest.mark.tpu
def test_sharded_step_needs_little_memory_beyond_its_arguments():
  config = ModelConfig(
    family="llama",
    num_layers=32,
    d_model=1024,
    d_ff=1408,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=4096,
  )
  program, state = tpu.compile_optimizer(
    "v5p:2x2x1", config, {"data": 1, "fsdp": 4, "tensor": 1}, "fused"
  )
  memory = program.memory_analysis()
  params = (memory.argument_size_in_bytes - state) / 8
  # optax stores 8 bytes per parameter.
  assert state / params < 0.27 * 8
  assert memory.temp_size_in_bytes < 0.5 * params


def activation_specs(rows: int, width: int):
  """Returns the shapes of dy, of gate or up, and of a scale."""
  codes = jax.ShapeDtypeStruct((1, rows, width), E4M3)
  scales = jax.ShapeDtypeStruct((1, rows, width // 16), jnp.bfloat16)
  dy = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((), jnp.float32)
  return dy, QTensor(codes, scales, 16), scale


# XLA copies dy, codes and results to another layout, but stores nothing in f32.
# XLA does not fuse the reshape of a width of 11008, which has 688 groups.
@pytest.mark.tpu
@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "v6e:2x2"])
def test_gated_activation_stores_nothing_in_f32(name):
  dy, part, scale = activation_specs(2048, 11008)
  bytes_of_dy = 2 * math.prod(dy.shape)

  def forward(gate, up, scale):
    return ops.activation_fwd((gate, up), activation="silu", scale=scale)

  def backward(dy, gate, up, scale):
    return ops.activation_bwd_operands(
      dy, (gate, up), activation="silu", scale=scale
    )[:2]

  compiled = tpu.compile_for_tpu(name, forward, part, part, scale)
  assert temporary_bytes(compiled) < 1.5 * bytes_of_dy
  compiled = tpu.compile_for_tpu(name, backward, dy, part, part, scale)
  assert temporary_bytes(compiled) < 4 * bytes_of_dy


@pytest.mark.tpu
def test_weight_is_reshaped_in_fp8():
  w = jax.ShapeDtypeStruct((2048, 2, 5504), jnp.float32)
  scale = jax.ShapeDtypeStruct((), jnp.float32)

  def rows(w, scale):
    cache = ops.Operand(None, None, scale)
    return quantized_weight(w, cache, "rows", recipes.coat()).rows

  compiled = tpu.compile_for_tpu("tpu7x:2x2x1", rows, w, scale)
  assert temporary_bytes(compiled) < 4 * math.prod(w.shape)
