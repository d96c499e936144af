# SPDX-License-Identifier: Apache-2.0
"""Microbatches on a mesh: no sequence moves between devices."""

import dataclasses
import re

import jax

from tests.comparing import jit
from tests.train.runs import MODEL
from tests.train.steps import Trained
from train.presets import demo

CONFIG = dataclasses.replace(
  demo(),
  model=dataclasses.replace(demo().model, **{**MODEL, "num_layers": 1}),
  recipe="bf16",
  optim=dataclasses.replace(demo().optim, codec="float32"),
  batch=16,
  seq=32,
  accumulate=2,
  mesh="fsdp=8",
  report_state=False,
)
COLLECTIVE = re.compile(
  r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)"
)


def collectives(program):
  """Lists types of arrays that devices exchange, such as f32[256,8]{1,0}."""
  return [found[1] for found in COLLECTIVE.finditer(program.as_text())]


def test_microbatches_move_no_tokens():
  run = Trained(CONFIG)
  tokens = run.batch.update(shape=(CONFIG.batch, CONFIG.seq + 1))
  with jax.set_mesh(run.mesh):
    program = jit(run.step).lower(run.abstract, tokens).compile()
  moved = collectives(program)
  assert any(kind.startswith("f32") for kind in moved), "weights are gathered"
  assert not [kind for kind in moved if "s32" in kind]
