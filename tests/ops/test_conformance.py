# SPDX-License-Identifier: Apache-2.0
"""Compares every implementation of every operation with its definition.

The cases are those of `benchmarks.ops`, at the sizes of a real model and at
small sizes. Every operation must have a case. `tests/pallas` tests NaN,
degenerate groups and saturation.
"""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import cases as models
from benchmarks.cases import OpCase, Sizes
from benchmarks.ops import all_cases
from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops.types import Unsupported
from coat_jax.optimizer import adam, lion
from tests.comparing import assert_close, jit
from tests.ops import own_op
from tests.pallas.kernels import (
  assert_same_codes,
  for_h200,
  lowered_for_h200,
  needs_interpreter,
)

OPERATIONS = [x for x in vars(ops).values() if isinstance(x, ops.Op)]
OPERATIONS.append(own_op.double)
# Operations of optimizers. Their cases are in `tests/pallas`.
STEPS = [adam.adam_update, adam.adamw_step, lion.lion_step]


def cases_of(sizes: Sizes) -> list[OpCase]:
  ours = [case for case in all_cases(sizes) if isinstance(case, OpCase)]
  return [*ours, *own_op.cases(sizes)]


def name_of(case) -> str:
  return "-".join(map(str, (case.op, *case.shape.values())))


def of_cases(*sizes: Sizes, having: str):
  """Parametrizes a test by the cases whose first kernel is `having`.

  Later kernels are for arguments that the first one does not support, and are
  tested with such arguments elsewhere. "xla" selects all cases. The cases of
  the first sizes are quick tests, the others are slow.
  """
  cases = [
    pytest.param(case, marks=[pytest.mark.slow] if i else [])
    for i, each in enumerate(sizes)
    for case in cases_of(each)
    if having in case.implementations[:2]
  ]
  return pytest.mark.parametrize("case", cases, ids=name_of)


def on_specs(case, fn):
  """Returns what `fn` returns for tracers of the case's arguments."""
  results = []
  specs = jax.eval_shape(case.arrays)
  jax.eval_shape(lambda *args: results.append(case.call(fn, *args)), *specs)
  return results[0]


def test_every_operation_has_cases():
  for sizes in (Sizes(), models.SMOKE, models.UNEVEN, models.ODD):
    found = {case.op for case in cases_of(sizes)}
    assert found == {op.name for op in OPERATIONS}


@pytest.mark.parametrize(
  "op, implementation",
  [
    (op, name)
    for op in OPERATIONS + STEPS
    for name in op.implementations
    if name != "xla"
  ],
  ids=lambda x: getattr(x, "name", x),
)
def test_implementation_has_the_signature_of_the_definition(op, implementation):
  wanted = dict(inspect.signature(op.definition).parameters)
  actual = dict(inspect.signature(op.kernel(implementation)).parameters)
  if implementation in ("mosaic", "mosaic_tpu"):
    assert actual.pop("interpret").default is False
  assert [(x.name, x.kind, x.default) for x in actual.values()] == [
    (x.name, x.kind, x.default) for x in wanted.values()
  ]


# GELU's derivative contains 1 - tanh(u)^2, whose error of 2^-24 is multiplied
# by up to 20.
TOLERANCE = {
  ("activation_bwd_operands", "gelu_tanh"): 1e-5,
}


def assert_conforms(actual, expected, tolerance):
  """Compares results, with tolerances by dtype.

  On one side, XLA may fuse a product and a sum, which rounds once instead of
  twice. The resulting error of 2^-22 in f32 changes 1 code in 2^18.
  """
  actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
  for a, e in zip(actual, expected, strict=True):
    assert (a.dtype, a.shape) == (e.dtype, e.shape)
    if a.dtype in (E4M3, E5M2):
      assert_same_codes(a, e, 0.999)
    elif a.dtype == jnp.bfloat16:
      assert_close(a, e, 2.0**-8)
    else:
      # Sums are accumulated in a different order.
      assert_close(a, e, tolerance)


ROW_CASES = [
  pytest.param(case, marks=[pytest.mark.slow] if i else [], id=name_of(case))
  for i, sizes in enumerate((models.SMOKE, models.UNEVEN))
  for case in cases_of(
    dataclasses.replace(sizes, d_model=1280, d_ff=160 + 32 * i)
  )
  if case.implementations == ("xla", "mosaic")
  and not re.match("linear|grouped|attention", case.op)
]


@needs_interpreter
@pytest.mark.parametrize("case", ROW_CASES)
def test_interpreted_kernel_matches_definition(case):
  kernel = functools.partial(case.operation.kernel("mosaic"), interpret=True)
  args = case.arrays()
  actual = jit(functools.partial(case.call, kernel))(*args)
  definition = case.operation.definition
  expected = jit(functools.partial(case.call, definition))(*args)
  key = case.op, case.shape.get("activation")
  assert_conforms(actual, expected, TOLERANCE.get(key, 2e-6))


@of_cases(models.SMOKE, having="xla")
def test_operation_without_a_gpu_is_its_definition(case):
  specs = jax.eval_shape(case.arrays)
  programs = [
    str(jax.make_jaxpr(functools.partial(case.call, fn))(*specs))
    for fn in (case.operation, case.operation.definition)
  ]
  assert programs[0] == programs[1]


@of_cases(Sizes(), having="mosaic")
def test_mosaic_kernel_is_in_the_program_for_a_gpu(case):
  # Also vmap the call, with 64-bit indices; tests/aot compiles plain calls.
  specs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
    jax.eval_shape(case.arrays),
  )
  with jax.enable_x64(True):
    run = jax.vmap(functools.partial(case.call, case.operation))
    assert "mosaic_gpu" in lowered_for_h200(run, *specs)
  if case.op.startswith("attention"):
    return  # Attention's wrapper transposes the log-sum-exp.
  # If a wrapper transposed a kernel's input, XLA would compute the input twice.
  kernel = functools.partial(case.call, case.operation.kernel("mosaic"))
  program = str(jax.make_jaxpr(kernel)(*jax.eval_shape(case.arrays)))
  assert "transpose[" not in program


@of_cases(Sizes(), having="cublas")
def test_cublas_algorithm_is_in_the_program_for_a_gpu(case):
  specs = jax.eval_shape(case.arrays)
  call = functools.partial(case.call, case.operation)
  assert "algorithm = <" in lowered_for_h200(call, *specs)


@of_cases(Sizes(), having="xla")
def test_explain_names_the_implementation(case):
  explain = functools.partial(ops.explain, case.operation)
  said = on_specs(case, explain)
  assert case.call(explain, *jax.eval_shape(case.arrays)) == said
  _, *kernels = case.implementations
  if kernels:
    assert said == f"{case.op}: {kernels[0]} on a GPU, xla elsewhere"
    return
  why = "there is no kernel for it"
  if "scaling" in case.shape:
    scaling = case.shape["scaling"].capitalize()
    rule = "the kernel writes operands with one scale per tensor"
    why = f"{case.op}: {rule}, got {scaling}"
  assert said == f"{case.op}: xla everywhere ({why})"


@pytest.mark.parametrize(
  "case",
  [case for case in cases_of(models.ODD) if len(case.implementations) > 1],
  ids=name_of,
)
def test_xla_runs_what_kernels_refuse(case):
  said = on_specs(case, functools.partial(ops.explain, case.operation))
  reasons = []
  for name in case.operation.kernels:
    named = functools.partial(case.operation, implementation=name)
    with pytest.raises(Unsupported, match="pass implementation=No") as refusal:
      on_specs(case, named)
    reasons.append(str(refusal.value).split("; pass")[0])
  # Several kernels may give the same reason.
  why = "; ".join(dict.fromkeys(reasons))
  assert said == f"{case.op}: xla everywhere ({why})"
  specs = jax.eval_shape(case.arrays)
  with for_h200():
    programs = [
      str(jax.make_jaxpr(functools.partial(case.call, fn))(*specs))
      for fn in (case.operation, case.operation.definition)
    ]
  assert programs[0] == programs[1]
