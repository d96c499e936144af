# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused step for an H200: one kernel per leaf, and no copies."""

import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from coat_jax import codecs
from coat_jax.optax_coat import scale_by_coat_adam
from coat_jax.optimizer.fused import fused_coat_adamw, fused_coat_lion
from tests.aot.compiling import (
  compile_for_h200,
  instructions,
  peak_bytes,
  ptxas_reports,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

SHAPES = {"a": (64, 1024), "b": (4, 512, 256), "c": (64, 1024)}


def whole_copies(compiled) -> list[str]:
  """Returns the instructions that copy arrays, but not scalars."""
  return [
    i.text
    for i in instructions(compiled)
    if i.opcode in ("copy", "copy-start") and not i.shape.endswith("[]")
  ]


def kernels(compiled) -> int:
  return sum("mosaic_gpu" in i.text for i in instructions(compiled))


@pytest.mark.parametrize(
  "make, dtype, low_bits",
  [
    (fused_coat_adamw, jnp.float32, False),
    (fused_coat_adamw, jnp.bfloat16, False),
    (fused_coat_adamw, jnp.bfloat16, True),
    (fused_coat_lion, jnp.bfloat16, True),
  ],
)
def test_donated_step_is_one_kernel_per_leaf_and_copies_nothing(
  make, dtype, low_bits
):
  optimizer = make(1e-3, weight_decay=0.1, low_bits=low_bits)
  params = {k: jax.ShapeDtypeStruct(v, dtype) for k, v in SHAPES.items()}
  state = jax.eval_shape(optimizer.init, params)

  def step(params, state, grads):
    return optimizer.apply(grads, state, params)

  compiled = compile_for_h200(step, params, state, params, donate=(0, 1))
  assert kernels(compiled) == len(SHAPES)
  assert not whole_copies(compiled)
  assert temporary_bytes(compiled) < 2**16


def test_update_for_optax_is_one_kernel_per_leaf():
  optimizer = scale_by_coat_adam(codec=codecs.log8())
  params = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in SHAPES.items()}
  state = jax.eval_shape(optimizer.init, params)
  compiled = compile_for_h200(optimizer.update, params, state, donate=(1,))
  assert kernels(compiled) == len(SHAPES)
  assert not whole_copies(compiled)


# The leaves have 0.4 billion parameters. Rows of "odd" end in a short group.
MODEL = {
  "layers": (24, 2048, 8192),
  "embedding": (8000, 2048),
  "odd": (512, 5000),
  "norm": (24, 2048),
}


@pytest.mark.parametrize(
  "solver",
  [
    fused_coat_adamw(1e-3, codec=codecs.coat()),
    fused_coat_adamw(1e-3, codec=codecs.log8()),
    fused_coat_lion(1e-3),
  ],
  ids=["coat", "log8", "lion"],
)
def test_initial_state_is_made_without_encoding_whole_leaves(solver):
  params = {k: jax.ShapeDtypeStruct(v, "bfloat16") for k, v in MODEL.items()}
  compiled = compile_for_h200(solver.init, params)
  memory = compiled.memory_analysis()
  assert peak_bytes(compiled) <= memory.output_size_in_bytes + 2**20
  # Only two groups are reduced: a full one, and the short one that ends a row.
  reduces = [i for i in instructions(compiled) if i.opcode == "reduce"]
  assert reduces
  for i in reduces:
    assert i.shape.partition("{")[0] in ("f32[1]", "f32[2]", "s32[1]", "s32[2]")


DTYPES = ("float32", False), ("bfloat16", False), ("bfloat16", True)
NAMES = "coat", "coat_e8m0", "log8", "fp8"
STEPS = (
  *((name, *dtype) for name, dtype in itertools.product(NAMES, DTYPES)),
  ("lion", "bfloat16", True),
  ("factored", "float32", False),
  ("factored", "bfloat16", True),
)


def compile_all(folder: str) -> None:
  """Compiles all of STEPS; must run in a new process."""
  for name, dtype, low_bits in STEPS:
    os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/{name}-{dtype}-{low_bits}"
    os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
    compile_one(name, dtype, low_bits)


def compile_one(name: str, dtype: str, low_bits: bool) -> None:
  """Compiles a step of one leaf."""
  if name == "lion":
    optimizer = fused_coat_lion(1e-3, low_bits=low_bits)
  else:
    codec = (
      codecs.coat(second=name)
      if name == "factored"
      else getattr(codecs, name)()
    )
    optimizer = fused_coat_adamw(1e-3, codec=codec, low_bits=low_bits)
  p = jax.ShapeDtypeStruct((4096, 1024), dtype)
  state = jax.eval_shape(optimizer.init, p)
  compile_for_h200(lambda p, s, g: optimizer.apply(g, s, p), p, state, p)


def test_kernels_spill_no_registers(tmp_path):
  folders = ptxas_reports(__name__, tmp_path)
  assert len(folders) == len(STEPS)
