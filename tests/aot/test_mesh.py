# SPDX-License-Identifier: Apache-2.0
"""Checks a training step's kernels, and the arrays it moves between H200s.

This cannot be tested on a CPU, where XLA moves BF16 as f32 and FP8 as f16, and
runs no kernels.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.aot import h200_devices
from tests.aot.compiling import (
  compile_for_h200,
  fp8_matmul_calls,
  instructions,
)
from train import mesh as meshes
from train import step
from train.presets import llama2_7b

pytestmark = pytest.mark.aot

D, F, SEQ = 1024, 2816, 512


@functools.cache
def compiled_step(mesh, batch, *, is_twin):
  """Compiles a step of two layers with the `coat` recipe, or its BF16 twin."""
  config = llama2_7b()
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(
      config.model,
      num_layers=2,
      d_model=D,
      d_ff=F,
      num_heads=8,
      num_kv_heads=8,
    ),
    batch=batch,
    seq=SEQ,
    mesh=mesh,
  )
  if is_twin:
    config = config.bf16_twin(seed=0, out="")
  sizes = config.mesh_sizes
  devices = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
  on_mesh = meshes.make_mesh(sizes, h200_devices(devices))
  optimizer = step.build_optimizer(config, on_mesh)
  abstract = step.abstract_state(config, optimizer, on_mesh)
  tokens = jax.ShapeDtypeStruct(
    (batch, SEQ + 1), jnp.int32, sharding=meshes.batch_sharding(on_mesh)
  )
  return compile_for_h200(
    step.train_step(config, step.build_graph(config), optimizer, on_mesh),
    abstract,
    tokens,
    mesh=on_mesh,
    out_shardings=(
      step.shardings(abstract),
      jax.NamedSharding(on_mesh, jax.P()),
    ),
    donate=(0,),
  )


def moved(compiled):
  """Yields (opcode, (dtype, *sizes)) for each array that collectives return."""
  for each in instructions(compiled):
    opcode = each.opcode.removesuffix("-start")
    if opcode in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
      for dtype, sizes in re.findall(r"(\w+)\[([\d,]+)\]", each.shape):
        sizes = tuple(sorted(int(n) for n in sizes.split(",") if n != "1"))
        yield opcode, (dtype, *sizes)


# With so few tokens, XLA left to itself would gather tokens, not some weights.
@pytest.mark.parametrize(
  "fsdp, tensor, batch",
  [pytest.param(4, 1, 4, marks=pytest.mark.slow), (2, 2, 8)],
)
def test_bf16_gathers_rows_of_weights_but_not_columns(fsdp, tensor, batch):
  mesh = f"fsdp={fsdp},tensor={tensor}"
  found = list(moved(compiled_step(mesh, batch, is_twin=True)))
  gathered = [array for opcode, array in found if opcode == "all-gather"]
  # In each pass, a device gathers all rows of a weight's columns that it owns.
  gate_up = ("bf16", *sorted((D, 2, F // tensor)))
  assert gathered.count(gate_up) == 2
  if tensor > 1:
    assert ("bf16", *sorted((D, 2, F))) not in gathered
  assert not [array for opcode, array in found if opcode == "all-to-all"]
  assert not [array for array in gathered if array[0] == "f32"]


@pytest.mark.parametrize("fsdp, tensor, batch", [(4, 1, 4), (2, 2, 8)])
def test_coat_gathers_codes_and_runs_its_kernels(fsdp, tensor, batch):
  mesh = f"fsdp={fsdp},tensor={tensor}"
  compiled = compiled_step(mesh, batch, is_twin=False)
  found = list(moved(compiled))
  gathered = [array for opcode, array in found if opcode == "all-gather"]
  # In each pass, a device gathers codes of all rows of its own columns. In the
  # forward pass, the parts from each device are stacked along axis 0.
  assert ("f8e4m3fn", *sorted((D, 2 * F // tensor))) in gathered
  parts = fsdp, 2 * F // tensor, D // fsdp
  assert ("f8e4m3fn", *sorted(parts)) in gathered
  # No weight of a layer is gathered in another dtype.
  of_layers = {F, F // tensor, 2 * F // tensor, 3 * D // tensor}
  others = [array for array in gathered if not array[0].startswith("f8")]
  assert not [array for array in others if of_layers & set(array[1:])]
  assert not [array for opcode, array in found if opcode == "all-to-all"]
  assert "join_columns" in compiled.as_text()
  # The scan has a body for each pass. Each of the four weights has three
  # matmuls.
  assert len(fp8_matmul_calls(compiled)) >= 4 * 3
  # The optimizer's kernel runs once for each of the six matrices.
  mosaic = [x.text for x in instructions(compiled) if "mosaic_gpu" in x.text]
  assert sum("jit(_step)" in text for text in mosaic) == 6
  # The other kernels belong to the layers.
  assert len(mosaic) - 6 > 40


def amaxes_before(everything, gather):
  """Counts the collective amaxes that a gather's operands depend on."""
  same = [x for x in everything if x.computation == gather.computation]
  operands = {}
  for each in same:
    arguments = each.text.split(f"{each.opcode}(", 1)[1].split("), ", 1)[0]
    operands[each.name] = re.findall(r"%([\w.\-]+)", arguments)
  seen, left = set(), [gather.name]
  while left:
    name = left.pop()
    if name in operands and name not in seen:
      seen.add(name)
      left += operands[name]
  found = [x for x in same if x.name in seen and "calls=%fused_pmax" in x.text]
  return sum(x.opcode.endswith("-start") for x in found)


def test_gathers_do_not_wait_unnecessarily():
  everything = instructions(compiled_step("fsdp=4,tensor=1", 4, is_twin=False))
  # To evaluate a condition, the host would have to wait for the device.
  assert "conditional" not in {each.opcode for each in everything}
  # Codes are gathered for later matmuls, and must not wait for the amax of the
  # other operand.
  waits = {}
  for each in everything:
    is_gather = each.opcode in ("all-gather", "all-gather-start")
    if is_gather and "f8" in each.shape and "region" in each.computation:
      waits.setdefault(each.computation, set()).add(
        amaxes_before(everything, each)
      )
  backward, forward = sorted(waits.values(), key=max)
  # The first weight's gather waits for no amax, and the last weight's gather
  # waits for the amaxes of the three others. XLA may combine the other gathers.
  assert min(forward) == 0 and max(forward) == 3
  # In the backward pass, XLA computes the index into stacks together with the
  # first scale, so gathers wait for that scale's amax.
  assert max(backward) <= 1
