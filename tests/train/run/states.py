# SPDX-License-Identifier: Apache-2.0
"""States of a small model, and a data iterator, to save in checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from train import step
from train.data.batches import read_ahead, split_windows, train_batches
from train.data.tokens import TokenSource
from train.mesh import make_mesh, parse_mesh
from train.presets import demo
from train.run.checkpoint import Checkpoints


def config(codec="coat"):
  """Configures a model whose groups of moments no mesh of the tests splits."""
  model = dict(num_layers=2, d_model=64, d_ff=128, num_heads=2, num_kv_heads=2)
  return dataclasses.replace(
    demo(),
    model=dataclasses.replace(demo().model, **model),
    optim=dataclasses.replace(demo().optim, group_size=32, codec=codec),
    batch=8,
    seq=32,
    report_state=False,
  )


def abstract_state(mesh):
  sizes = parse_mesh(mesh)
  count = int(np.prod(list(sizes.values()) or [1]))
  mesh = make_mesh(sizes, jax.devices()[:count])
  return step.abstract_state(config(), step.build_optimizer(config()), mesh)


def random_state(abstract):
  """Fills a state with random bytes, which saving must not interpret."""
  rng = np.random.default_rng(0)

  def fill(leaf):
    bytes_ = rng.bytes(leaf.size * leaf.dtype.itemsize)
    x = np.frombuffer(bytes_, leaf.dtype).reshape(leaf.shape)
    return jax.device_put(x, leaf.sharding)

  state = jax.tree.map(fill, abstract)
  number = jax.device_put(jnp.int32(3), abstract.step.sharding)
  return state._replace(step=number)


def bytes_of(state):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def batches(index=0, count=1):
  tokens = TokenSource(
    name="numbers",
    parts=[np.arange(5000, dtype=np.uint16) % 251],
    vocab_size=256,
    held_out=0.1,
  )
  rows, _ = split_windows(tokens, 32)
  found = train_batches(
    rows, batch_size=4, seed=0, process_index=index, process_count=count
  )
  return iter(read_ahead(found))


def save(path, state, iterator=None, step=3, **options):
  checkpoints = Checkpoints(path, keep=3)
  checkpoints.save(step, state, iterator or batches(), {"config": {}})
  checkpoints.close()
