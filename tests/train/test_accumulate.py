# SPDX-License-Identifier: Apache-2.0
"""Microbatches give the same step as a whole batch, and share weight codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.matrices import quick
from tests.train.steps import (
  EXACT,
  SMALL,
  TOKENS,
  Trained,
  largest_difference,
  on,
)
from train import step

MESH = "data=2,fsdp=2,tensor=2"


@pytest.fixture(scope="module")
def whole():
  return Trained(EXACT).run()


@pytest.mark.parametrize("mesh, accumulate", quick(0, [(MESH, 2), ("", 4)]))
def test_microbatches_give_the_losses_of_the_whole_batch(
  whole, mesh, accumulate
):
  parts = Trained(on(EXACT, mesh, accumulate=accumulate)).run()
  # As in test_mesh, the summation order differs.
  assert largest_difference(whole, parts) <= 1e-5


@pytest.mark.slow
def test_masked_losses_do_not_depend_on_the_number_of_microbatches():
  # All microbatches have the same two sequences, so their experts have the same
  # load, and the gradients must equal those of the whole batch.
  model = dataclasses.replace(
    EXACT.model,
    family="qwen3_moe",
    num_layers=1,
    num_experts=4,
    experts_per_token=2,
    auxiliary_loss=10.0,  # The router dominates the gradient norm.
  )
  tokens = np.repeat(TOKENS[:2], 4, axis=0)
  is_target = np.arange(33)[None] > np.int32([[5], [20]]).repeat(4, axis=0)
  rows = dict(tokens=tokens, is_target=is_target)

  def first_step(accumulate):
    config = dataclasses.replace(EXACT, model=model, accumulate=accumulate)
    run = Trained(config, rows)
    state = step.initial_state(config, run.optimizer)
    evaluate = step.eval_step(step.build_graph(config), accumulate=accumulate)
    held_out = jax.jit(evaluate)(state.params, rows)
    assert held_out.targets == np.sum(is_target)
    metrics = jax.jit(run.step)(state, rows)[1]
    found = metrics.loss, metrics.grad_norm, held_out.loss
    return [float(x) for x in found]

  # As above, the summation order differs.
  assert first_step(4) == pytest.approx(first_step(1), rel=1e-5)


@pytest.mark.parametrize("mesh, accumulate", quick(1, [("", 4), (MESH, 2)]))
def test_evaluation_runs_one_microbatch_at_a_time(mesh, accumulate):
  run = Trained(on(EXACT, mesh))
  state = step.initial_state(run.config, run.optimizer, run.mesh)
  tokens = jax.device_put(TOKENS, run.where)
  graph = step.build_graph(run.config)

  def evaluate(parts):
    program = step.compile_on(
      run.mesh,
      step.eval_step(graph, accumulate=parts),
      run.abstract.params,
      run.batch,
    )
    memory = program.memory_analysis().temp_size_in_bytes
    return float(program(state.params, tokens).loss), memory

  (whole, most), (mean, less) = evaluate(1), evaluate(accumulate)
  assert mean == pytest.approx(whole, abs=1e-6)
  # On a mesh, gathered weights take most of the memory of so small a step.
  if not mesh:
    assert less < most / 2


def equations(jaxpr):
  """Yields the equations of a jaxpr and of all jaxprs in it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr),
    ):
      if isinstance(inner, ClosedJaxpr | Jaxpr):
        yield from equations(getattr(inner, "jaxpr", inner))


def quantized_weights(cache):
  """Counts conversions of `down` [F, D] to FP8 in a microbatch."""
  config = dataclasses.replace(SMALL, accumulate=4, weight_cache=cache)
  (loop,) = (
    equation
    for equation in Trained(config).jaxpr().eqns
    if equation.primitive.name == "scan" and equation.params["length"] == 4
  )
  return sum(
    equation.primitive.name == "convert_element_type"
    and equation.params["new_dtype"] == jnp.float8_e4m3fn
    and sorted(equation.outvars[0].aval.shape) == [64, 256]
    for equation in equations(loop.params["jaxpr"])
  )


def test_weight_codes_are_computed_once_for_all_microbatches():
  assert quantized_weights("scale") >= 2, "one forward, one backward"
  assert quantized_weights("codes") == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick(1, ["bfloat16", "float32"]))
def test_gradients_are_summed_over_devices_in_the_given_dtype(dtype):
  config = on(SMALL, MESH, grad_reduce=dtype)
  found = {
    equation.invars[0].aval.dtype
    for equation in equations(Trained(config).jaxpr())
    if equation.primitive.name == "reduce_scatter"
    and equation.invars[0].aval.ndim == 2
  }
  assert found == {jnp.dtype(dtype)}
