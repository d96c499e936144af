# SPDX-License-Identifier: Apache-2.0
"""Evaluation computes in FP8 as training does, or in BF16 on request."""

import dataclasses

import jax
import pytest

from tests.train.runs import MODEL
from train import step
from train.presets import demo


@pytest.mark.parametrize(
  "recipe, remat",
  [("coat", "none"), ("fp8_linear", "none"), ("coat", "fp8_layer")],
)
@pytest.mark.parametrize("evaluation", ["same", "bf16"])
def test_evaluation_computes_in_fp8_unless_bf16_is_requested(
  recipe, remat, evaluation
):
  config = dataclasses.replace(
    demo(),
    model=dataclasses.replace(demo().model, **MODEL),
    recipe=recipe,
    remat=remat,
    evaluation=evaluation,
  )
  params = step.abstract_state(config, step.build_optimizer(config)).params
  tokens = jax.ShapeDtypeStruct((2, 33), "int32")
  evaluate = step.eval_step(step.build_graph(config))
  program = str(jax.make_jaxpr(evaluate)(params, tokens))
  # Types are written f8_e4m3fn[...] and bf16[...].
  assert ("f8_" in program) == (evaluation == "same")
  assert "bf16[" in program
