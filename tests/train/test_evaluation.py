# SPDX-License-Identifier: Apache-2.0
"""What evaluation computes: FP8 as training does, or BF16 where asked."""

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
def test_evaluation_has_fp8_only_where_it_is_that_of_training(
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
