# SPDX-License-Identifier: Apache-2.0
"""Some steps of a tiny run on a mesh, without its files."""

import dataclasses

import jax
import numpy as np

from train import mesh as meshes
from train import step
from train.presets import demo

STEPS = 5
MESHES = ("fsdp=8", "data=2,fsdp=2,tensor=2")
# Of the second mesh a device has 64 columns of q, k and v.
SMALL = dataclasses.replace(
  demo(),
  model=dataclasses.replace(
    demo().model, num_layers=2, d_model=64, d_ff=256, vocab_size=384
  ),
  optim=dataclasses.replace(demo().optim, warmup=2, group_size=64),
  batch=8,
  seq=32,
  report_state=False,
)
# Rounding is as small as it gets: what is left are faults.
EXACT = dataclasses.replace(
  SMALL.bf16_twin(seed=0, out="exact"), compute="float32"
)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33), np.int32)


class Trained:
  """Some steps of a run, all with one batch, which it learns.

  The batch is tokens, or a dict of what `Batch.make` takes.
  """

  def __init__(self, config, rows=TOKENS):
    self.config, self.rows = config, rows
    self.mesh = meshes.make_mesh(config.mesh_sizes)
    self.optimizer = step.build_optimizer(config, self.mesh)
    self.step = step.train_step(
      config, step.build_graph(config), self.optimizer, self.mesh
    )
    self.where = meshes.batch_sharding(self.mesh) if self.mesh else None
    self.abstract = step.abstract_state(config, self.optimizer, self.mesh)
    self.batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.where),
      rows,
    )

  def run(self):
    self.program = step.compile_on(
      self.mesh, self.step, self.abstract, self.batch, updates=True
    )
    state = step.initial_state(self.config, self.optimizer, self.mesh)
    self.initial = jax.tree.map(np.asarray, state)
    self.losses = []
    rows = jax.device_put(self.rows, self.where)
    for _ in range(STEPS):
      state, self.metrics = self.program(state, rows)
      self.losses.append(float(self.metrics.loss))
    self.state = state
    return self

  def jaxpr(self):
    with jax.set_mesh(self.mesh):
      return jax.make_jaxpr(self.step)(self.abstract, self.batch).jaxpr


def on(config, mesh, **options):
  return dataclasses.replace(config, mesh=mesh, **options)


def gpt2(config):
  """The run with a GPT-2 of its size, not tied: a CPU has no such product."""
  model = dataclasses.replace(
    config.model, family="gpt2", max_positions=config.seq
  )
  return dataclasses.replace(config, model=model)


def largest_difference(a, b):
  return np.max(np.abs(np.subtract(a.losses, b.losses)))
