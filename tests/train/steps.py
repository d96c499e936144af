# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model for a few steps on a mesh, without writing files."""

import dataclasses

import jax
import numpy as np

from train import mesh as meshes
from train import step
from train.presets import demo

STEPS = 5
MESHES = ("fsdp=8", "data=2,fsdp=2,tensor=2")
# On the second mesh, each device has 64 of the 128 columns of [q, k, v], which
# are one whole group.
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
# Computes in f32, so that only bugs cause large differences.
EXACT = dataclasses.replace(
  SMALL.bf16_twin(seed=0, out="exact"), compute="float32"
)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33), np.int32)


class Trained:
  """Trains for a few steps, all on the same batch.

  `rows` is an array of tokens or a dict of keyword arguments for `Batch.make`.
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
  """Returns the config of a GPT-2 of the same size, with untied embeddings."""
  model = dataclasses.replace(
    config.model, family="gpt2", max_positions=config.seq
  )
  return dataclasses.replace(config, model=model)


def largest_difference(a, b):
  return np.max(np.abs(np.subtract(a.losses, b.losses)))
