# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels, layers and steps for GPUs on which they have never run.

An A100 has compute capability 8.0, an L4 8.9, a B200 10.0 and an RTX PRO 6000
12.0. The tests compare `ops.explain` with the compiler: kernels that it names
must compile, and kernels that it refuses because of the GPU must not.
"""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from benchmarks.aot import compile_for
from benchmarks.cases import OpCase, Sizes
from benchmarks.ops import all_cases
from coat_jax import codecs, ops, recipes
from coat_jax.ops import capability
from coat_jax.optimizer.fused import fused_coat_adamw, fused_coat_lion
from tests.aot.compiling import (
  custom_calls,
  fp8_matmul_calls,
  instructions,
)
from tests.aot.test_layers import SMALL, layer_program

pytestmark = [pytest.mark.aot, pytest.mark.slow]

GPUS = {"a100": 8.0, "l4": 8.9, "b200": 10.0, "rtx_pro_6000": 12.0}
each_gpu = pytest.mark.parametrize("gpu", GPUS)

CALLS = {
  "cublas": "__cublas$lt$matmul$f8",
  "cudnn": "__cudnn$fmhaSoftmax",
  "mosaic": "mosaic_gpu",
}


def key(case: OpCase) -> tuple:
  """Returns the options of a case that change its kernel."""
  differs = ("layout", "gated", "rotated", "window", "soft_cap", "documents")
  return case.op, *map(case.shape.get, differs)


CASES = {
  key(case): case
  for case in reversed(list(all_cases(Sizes())))
  if isinstance(case, OpCase) and case.implementations[1:]
}.values()
CASES = sorted(CASES, key=lambda case: str(key(case)))
each_case = pytest.mark.parametrize(
  "case", CASES, ids=lambda case: "-".join(map(str, key(case)))
)
# The kernels of these operations compile for an A100, because they do not
# convert values to or from E4M3.
WITHOUT_E4M3 = {
  "attention_bwd": "cudnn",
  "attention_fwd": "cudnn",
  "join_columns": "mosaic",
  "turn_codes": "mosaic",
}


def is_for_hopper(case: OpCase) -> bool:
  """Returns whether the kernel uses Hopper's matmuls or copy engine."""
  is_attention = case.op.startswith("attention")
  runs = case.implementations[1]
  is_of_experts = case.op.startswith(("grouped", "take_rows"))
  return is_of_experts or is_attention and runs == "mosaic"


def compile_operations(gpu: str) -> None:
  """Prints each operation's custom calls and the text of `explain`, as JSON."""
  for case in CASES:
    said = []

    def fn(*args, case=case, said=said):
      explain = functools.partial(ops.explain, case.operation)
      said.append(case.call(explain, *args))
      return case.call(case.operation, *args)

    compiled = compile_for(gpu, fn, *jax.eval_shape(case.arrays))
    calls = [
      x.text for x in instructions(compiled) if x.opcode == "custom-call"
    ]
    found = [
      name
      for name, call in CALLS.items()
      if any(f'custom_call_target="{call}' in text for text in calls)
    ]
    print(json.dumps([key(case), found, said[0]]))


@functools.cache
def operations(gpu: str) -> dict:
  """Returns the custom calls of each operation, and what `explain` says."""
  ended = run(f"tests.compile_operations({gpu!r})")
  assert not ended.returncode, ended.stderr[-2000:]
  rows = map(json.loads, ended.stdout.splitlines())
  return {tuple(key): (calls, said) for key, calls, said in rows}


@each_gpu
@each_case
def test_operation_compiles_to_what_explain_names(gpu, case):
  calls, said = operations(gpu)[key(case)]
  expected = case.implementations[1]
  why = ""
  if gpu == "a100":
    expected = WITHOUT_E4M3.get(case.op, "xla")
    why = "needs compute capability 8.9 or newer, got 8.0"
  if is_for_hopper(case):
    expected, why = "xla", "needs compute capability 9.0 (Hopper)"
  assert calls == [name for name in CALLS if name == expected]
  if expected == "xla":
    assert said.startswith(f"{case.op}: xla everywhere (") and why in said
    return
  assert said == (
    f"{case.op}: {expected} on a GPU, xla elsewhere (compiled for compute "
    f"capability {GPUS[gpu]}, never run there)"
  )


NEXT = "--- next operation ---"


def compile_refused(name: str) -> None:
  """Compiles operations for an A100 although they refuse it; prints errors."""
  capability.capability = lambda: None  # Now nothing is refused.
  for case in CASES:
    casts = "quantize_rows", "quantize_experts"
    if case.op in (*WITHOUT_E4M3, "tensor_scale", *casts):
      # These compile: XLA emulates `casts`, and the others convert nothing.
      continue
    if name != case.implementations[1] or is_for_hopper(case):
      continue
    kernel = functools.partial(case.operation, implementation=name)
    fn = functools.partial(case.call, kernel)
    print(NEXT, file=sys.stderr, flush=True)
    try:
      compile_for("a100", fn, *jax.eval_shape(case.arrays))
      print("none")
    except (NotImplementedError, JaxRuntimeError) as error:
      print(str(error).replace("\n", " "))


@pytest.mark.parametrize(
  "implementation, refusal",
  [
    ("cublas", "Unsupported algorithm"),
    ("mosaic", r"requires \.target sm_89 or higher"),
  ],
)
def test_refused_operations_do_not_compile_for_an_a100(implementation, refusal):
  ended = run(f"tests.compile_refused({implementation!r})")
  errors = ended.stdout.splitlines()
  assert errors, ended.stderr[-2000:]
  # Mosaic's compiler prints errors to stderr.
  _, *details = ended.stderr.split(NEXT)
  for error, more in zip(errors, details, strict=True):
    assert error != "none" and re.search(refusal, error + more), error


def compile_layer(gpu: str) -> None:
  """Compiles a decoder layer, and checks that it calls cuDNN and cuBLAS."""
  gradients, *specs = layer_program(SMALL, recipes.coat(), (2, 256))
  compiled = compile_for(gpu, gradients, *specs)
  found = custom_calls(compiled)
  assert (
    found["__cudnn$fmhaSoftmax"] == found["__cudnn$fmhaSoftmaxBackward"] == 1
  )
  if gpu != "a100":
    assert len(fp8_matmul_calls(compiled)) == 12
    return
  assert not fp8_matmul_calls(compiled)
  # The codes are upcast, but saved arrays stay FP8.
  assert found["__cublas$lt$matmul"] + found["__cublas$gemm"] == 12
  assert [x for x in instructions(compiled) if "f8e4m3fn[" in x.shape]


@each_gpu
def test_decoder_layer_compiles(gpu):
  ended = run(f"tests.compile_layer({gpu!r})")
  assert not ended.returncode, ended.stderr[-2000:]


F32, BF16 = jnp.float32, jnp.bfloat16
STEPS = [
  (fused_coat_adamw, "coat", F32),
  (fused_coat_adamw, "coat", BF16),
  (fused_coat_adamw, "coat_e8m0", F32),
  (fused_coat_adamw, "log8", F32),
  (fused_coat_adamw, "fp8", F32),
  (fused_coat_lion, "coat", BF16),
]


def compile_steps(gpu: str) -> None:
  """Prints the number of kernels in each step, and the text of `explain`."""
  for make, codec, dtype in STEPS:
    optimizer = make(1e-3, codec=getattr(codecs, codec)())
    params = jax.ShapeDtypeStruct((4096, 1024), dtype)
    state = jax.eval_shape(optimizer.init, params)
    said = []

    def step(params, state, grads, optimizer=optimizer, said=said):
      said.extend(optimizer.explain(params).values())
      return optimizer.apply(grads, state, params)

    compiled = compile_for(gpu, step, params, state, params, donate=(0, 1))
    kernels = sum("mosaic_gpu" in x.text for x in instructions(compiled))
    print(kernels, *said)


def run(code: str) -> subprocess.CompletedProcess:
  """Runs code in a new process, because Mosaic compiles for only one GPU."""
  start = "from benchmarks import aot; aot.only_compile(); "
  start += "from tests.aot import test_other_gpus as tests; "
  return subprocess.run(
    [sys.executable, "-W", "ignore", "-c", start + code],
    env=os.environ,
    capture_output=True,
    text=True,
    timeout=600,
  )


@each_gpu
def test_optimizer_step_is_a_kernel_only_on_hopper_and_newer(gpu):
  ended = run(f"tests.compile_steps({gpu!r})")
  assert not ended.returncode, ended.stderr[-2000:]
  lines = ended.stdout.splitlines()
  assert len(lines) == len(STEPS)
  runs = "mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  tried = f"(compiled for compute capability {GPUS[gpu]}, never run there)"
  for line in lines:
    if GPUS[gpu] > 9:
      assert line[0] == "1" and line.endswith(f": {runs} {tried}")
    else:
      assert line[0] == "0" and "mosaic on a GPU" not in line
      assert f"capability 9.0 or newer, got {GPUS[gpu]}" in line


def compile_step_unchecked(gpu: str) -> None:
  capability.capability = lambda: None  # Now nothing is refused.
  # Modules that import this function must be imported after it is replaced.
  from coat_jax.pallas.mosaic import leaf_step

  leaf_step._takes_turns = lambda *_: False  # Turns need Hopper's copies, too.
  optimizer = fused_coat_adamw(1e-3)
  params = jax.ShapeDtypeStruct((4096, 1024), F32)
  state = jax.eval_shape(optimizer.init, params)
  compile_for(gpu, optimizer.apply, params, state, params)


@pytest.mark.parametrize("gpu", ["a100", "l4"])
def test_optimizer_kernel_does_not_compile_before_hopper(gpu):
  ended = run(f"tests.compile_step_unchecked({gpu!r})")
  least = {"a100": 89, "l4": 90}[gpu]
  assert f"requires .target sm_{least} or higher" in ended.stderr
